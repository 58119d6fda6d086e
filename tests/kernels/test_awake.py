"""Processes that keep processor cores awake: what they are, and that none is ever left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from turboquant_mlx.errors import OptionError
from turboquant_mlx.kernels import awake
from turboquant_mlx.kernels.dispatch import force_backend

linux = pytest.mark.skipif(sys.platform != "linux", reason="works on Linux only")


@pytest.fixture
def possible(monkeypatch):
    """A machine where it can be done, even if the one of these tests has a GPU or a limit."""
    monkeypatch.setattr(awake, "_is_limited", lambda mount, membership: False)
    with force_backend("cpu"):
        yield


def is_running(pid: int) -> bool:
    """Whether there is such a process; one that only waits to be collected is none."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


@linux
def test_each_core_has_a_process_of_the_idle_class_while_the_block_runs(possible):
    cpus = sorted(os.sched_getaffinity(0))[: awake.MOST_CORES]
    with awake.cores_awake() as loops:
        assert all(map(is_running, loops))
        assert [os.sched_getaffinity(pid) for pid in loops] == [{cpu} for cpu in cpus]
        assert {os.sched_getscheduler(pid) for pid in loops} == {os.SCHED_IDLE}
    assert not any(map(is_running, loops))


@linux
def test_fewer_cores_can_be_asked_for(possible):
    with awake.cores_awake(1) as loops:
        (loop,) = loops
        assert os.sched_getaffinity(loop) == {min(os.sched_getaffinity(0))}


@linux
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_the_processes_are_gone_after_an_exception(possible, error):
    with pytest.raises(error), awake.cores_awake() as loops:
        raise error
    assert loops and not any(map(is_running, loops))


@linux
def test_a_process_that_died_meanwhile_is_no_error(possible):
    with awake.cores_awake(1) as loops:
        os.kill(loops[0], signal.SIGKILL)
    assert not is_running(loops[0])


@linux
def test_none_is_left_behind_by_a_parent_that_is_killed():
    code = """
import time
from turboquant_mlx.kernels import awake
awake.why_not_awake = lambda: ""
with awake.cores_awake() as loops:
    print(*loops, flush=True)
    time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    loops = [int(pid) for pid in parent.stdout.readline().split()]
    try:
        assert loops and all(map(is_running, loops))
    finally:
        parent.kill()
        parent.communicate()
    # idle processes of a busy machine notice it late
    give_up = time.monotonic() + 60
    while any(map(is_running, loops)) and time.monotonic() < give_up:
        time.sleep(0.02)
    assert not any(map(is_running, loops))


@linux
def test_a_system_that_refuses_leaves_no_process_and_says_so(possible, monkeypatch):
    started = []
    real = subprocess.Popen

    def popen(*args, **kwargs):
        started.append(real(*args, **kwargs))
        return started[-1]

    def refuse(*args):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    expected = "cannot be kept awake: Operation not permitted"
    with pytest.raises(OptionError, match=expected), awake.cores_awake():
        pytest.fail("nothing is kept awake")
    assert len(started) == 1
    assert not is_running(started[0].pid)


@linux
def test_where_it_can_be_done_there_is_no_reason_against_it(possible):
    assert awake.why_not_awake() == ""


def test_other_systems_a_gpu_a_limit_and_a_missing_class_are_reasons(possible, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert awake.why_not_awake() == "this works on Linux only"
    with pytest.raises(OptionError, match="works on Linux only"), awake.cores_awake():
        pytest.fail("nothing is kept awake")
    monkeypatch.setattr(sys, "platform", "linux")
    for choice in ("metal", "cuda", "portable"):
        with force_backend(choice):
            assert awake.why_not_awake() == "MLX runs on the GPU here"
    with monkeypatch.context() as patch:
        patch.delattr(os, "SCHED_IDLE", raising=False)
        assert "no scheduling class" in awake.why_not_awake()
    monkeypatch.setattr(os, "SCHED_IDLE", 5, raising=False)
    monkeypatch.setattr(awake, "_is_limited", lambda mount, membership: True)
    assert "is limited" in awake.why_not_awake()


V2, V1 = "0::/a/b\n", "4:memory:/m\n3:cpu,cpuacct:/a/b\n0::/\n"


@pytest.mark.parametrize(
    ("membership", "file", "text", "limited"),
    [
        (V2, "a/b/cpu.max", "150000 100000\n", True),
        (V2, "a/cpu.max", "150000 100000\n", True),  # a group above limits too
        (V2, "cpu.max", "150000 100000\n", True),  # as a container sees its own
        (V2, "a/b/cpu.max", "max 100000\n", False),
        (V2, "other/cpu.max", "150000 100000\n", False),
        (V1, "cpu/a/b/cpu.cfs_quota_us", "150000\n", True),
        (V1, "cpu,cpuacct/a/cpu.cfs_quota_us", "150000\n", True),
        (V1, "cpu/cpu.cfs_quota_us", "150000\n", True),
        (V1, "cpu/cpu.cfs_quota_us", "-1\n", False),
        (V1, "memory/m/cpu.cfs_quota_us", "150000\n", False),
        ("", "cpu.max", "150000 100000\n", False),
    ],
)
def test_a_limit_is_one_of_the_groups_that_the_process_is_in(
    tmp_path, membership, file, text, limited
):
    (tmp_path / "membership").write_text(membership)
    path = tmp_path / "mount" / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert awake._is_limited(tmp_path / "mount", tmp_path / "membership") is limited
