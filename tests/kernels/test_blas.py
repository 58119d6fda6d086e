"""Sharing products between threads while the BLAS keeps to one."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from threadpoolctl import threadpool_info

from turboquant_mlx.kernels import blas
from turboquant_mlx.kernels.blas import one_thread, pieces_of, share


def blas_threads():
    return [lib["num_threads"] for lib in threadpool_info() if lib["user_api"] == "blas"]


def test_the_blas_has_one_thread_inside_and_what_it_had_outside():
    before = blas_threads()
    with one_thread():
        assert set(blas_threads()) <= {1}
        with one_thread():
            pass
        assert set(blas_threads()) <= {1}
    assert blas_threads() == before


def test_threads_may_overlap():
    """How an overlap shows in the count depends on the build; the products never do."""
    rng = np.random.default_rng(0)
    x, weight = (rng.standard_normal((n, 64)).astype(np.float32) for n in (50, 70))
    results = []

    def work():
        for _ in range(20):
            with one_thread():
                results.append(x @ weight.T)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 60
    for result in results:
        np.testing.assert_allclose(result, results[0], rtol=1e-4, atol=1e-4)


def test_every_piece_is_done_once():
    done = []
    share(lambda a, b: done.extend(range(a, b)), pieces_of(1003, 10))
    assert sorted(done) == list(range(1003))


def test_an_error_in_any_piece_is_raised():
    def work(start, stop):
        if start == 70:
            raise ValueError("piece 70")

    with pytest.raises(ValueError, match="piece 70"):
        share(work, pieces_of(100, 10))


@pytest.mark.parametrize("length", [0, 1, 7])
def test_pieces_cover_the_length(length):
    pieces = pieces_of(length, 3)
    assert [i for a, b in pieces for i in range(a, b)] == list(range(length))


@pytest.mark.parametrize("rows", [960, 3072, 1001])
def test_a_product_of_one_row_is_the_same_with_any_number_of_threads(rows, monkeypatch):
    rng = np.random.default_rng(0)
    matrix = rng.standard_normal((rows, 577)).astype(np.float32)
    x = rng.standard_normal((1, 577)).astype(np.float32)
    with blas.one_thread():
        expected = x @ matrix.T
    for cpus in (1, 2, 3, 6, 16):
        monkeypatch.setattr(blas, "usable_cpus", lambda cpus=cpus: cpus)
        monkeypatch.setattr(blas, "_contention", blas._Contention())
        np.testing.assert_array_equal(blas.small_product(x, matrix), expected)


def test_cores_that_others_want_are_left_to_them_for_a_while():
    contention = blas._Contention()
    for _ in range(contention.TRIAL):
        contention.note(wall_s=1e-3, own_s=0.9e-3, clock_s=10.0)
    assert not contention.now(10.1)
    for _ in range(contention.TRIAL):
        contention.note(wall_s=1e-3, own_s=0.3e-3, clock_s=20.0)
    assert contention.now(20.1)
    assert not contention.now(20.0 + contention.PAUSE_S)
