"""Processes that search trellis codes: the same results, whatever happens to them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from turboquant_mlx.quant import helpers
from turboquant_mlx.quant.threads import for_each
from turboquant_mlx.quant.trellis_table import trellis_table
from turboquant_mlx.quant.viterbi import best_windows, make_trellis, stretch_codes

TRELLIS = {bits: make_trellis(trellis_table(bits), bits, 8) for bits in (2, 3, 4)}
X = np.random.default_rng(0).standard_normal((100, 12)).astype(np.float32)
EXPECTED = {bits: best_windows(X, trellis) for bits, trellis in TRELLIS.items()}


@pytest.fixture(autouse=True)
def no_helpers(monkeypatch):
    helpers.close_all()
    monkeypatch.setattr(helpers, "_failures", 0)
    yield
    helpers.close_all()


def in_threads(work, count: int = 4) -> list:
    results = [None] * count

    def run(i: int) -> None:
        results[i] = work(i)

    for_each(run, range(count), threads=2)
    return results


def search(i: int) -> bool:
    bits = 2 + i % 3
    return np.array_equal(best_windows(X, TRELLIS[bits]), EXPECTED[bits])


def pids() -> list[int]:
    return [helper._process.pid for helper in helpers._idle]


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_one_thread_needs_no_helper():
    assert search(0)
    for_each(search, range(4), threads=1)
    assert pids() == []


def test_several_threads_have_a_helper_each_and_keep_it():
    assert all(in_threads(search))
    first = pids()
    assert 1 <= len(first) <= 2
    assert all(in_threads(search))
    assert set(first) <= set(pids())
    assert len(pids()) <= 2


def test_stretches_with_given_states_are_searched_too():
    start, end = np.arange(12) % 32, np.arange(12)[::-1] % 32
    expected = stretch_codes(X, TRELLIS[3], start, end)
    for found in in_threads(lambda _: stretch_codes(X, TRELLIS[3], start, end)):
        np.testing.assert_array_equal(found, expected)
    assert pids()


def test_helpers_end_when_asked():
    in_threads(search)
    running = pids()
    helpers.close_all()
    assert not any(is_running(pid) for pid in running)


def test_a_killed_helper_is_replaced():
    in_threads(search)
    for pid in pids():
        os.kill(pid, signal.SIGKILL)
    assert all(in_threads(search))


def test_a_helper_that_dies_at_work_leaves_the_work_to_us(monkeypatch):
    monkeypatch.setattr(helpers, "_PROGRAM", "import sys; sys.stdin.buffer.read(100)")
    assert all(in_threads(search, 6))
    assert pids() == []
    assert helpers._failures >= helpers._MOST_FAILURES


@pytest.mark.parametrize("executable", ["", "/nowhere/python"])
def test_without_an_interpreter_to_start_we_do_it_ourselves(monkeypatch, executable):
    monkeypatch.setattr(sys, "executable", executable)
    assert all(in_threads(search))
    assert pids() == []


def test_an_interrupt_of_all_does_not_reach_the_helpers():
    in_threads(search)
    for pid in pids():
        os.kill(pid, signal.SIGINT)
    before = pids()
    assert all(in_threads(search))
    assert set(before) <= set(pids())


def test_idle_helpers_end_by_themselves(monkeypatch):
    program = (
        "from turboquant_mlx.quant import helpers; helpers.IDLE_SECONDS = 0.1; helpers.serve()"
    )
    monkeypatch.setattr(helpers, "_PROGRAM", program)
    in_threads(search)
    for helper in helpers._idle:
        assert helper._process.wait(timeout=20) == 0
    assert all(in_threads(search))


def test_helpers_end_with_their_parent():
    program = (
        "import sys, threading; sys.path.insert(0, sys.argv[1])\n"
        "import test_helpers as t\n"
        "t.in_threads(t.search)\n"
        "print(*t.pids(), flush=True)\n"
        "import os; os._exit(0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(Path(__file__).parent)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=True,
    )
    left = [int(pid) for pid in done.stdout.split()]
    assert left
    deadline = time.monotonic() + 20
    while any(map(is_running, left)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_helpers_load_neither_mlx_nor_the_rest():
    program = (
        "import sys, turboquant_mlx.quant.helper_process\n"
        "print([m for m in ('mlx', 'mlx.core', 'transformers', 'mlx_lm') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[]\n"


def test_threads_of_other_programs_are_not_ours():
    found = []
    thread = threading.Thread(target=lambda: found.append(search(1)))
    thread.start()
    thread.join()
    assert found == [True]
    assert pids() == []
