"""Sharing products between threads while the BLAS keeps to one."""

from __future__ import annotations

import threading

import pytest
from threadpoolctl import threadpool_info

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
    before = blas_threads()
    inside, leave = threading.Event(), threading.Event()

    def hold():
        with one_thread():
            inside.set()
            leave.wait(60)

    other = threading.Thread(target=hold)
    other.start()
    inside.wait(60)
    with one_thread():
        assert set(blas_threads()) <= {1}
    # leaving first must not give threads back to one that is still inside
    if all(lib.get("threading_layer") != "openmp" for lib in threadpool_info()):
        assert set(blas_threads()) <= {1}
    leave.set()
    other.join()
    assert blas_threads() == before


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
