"""Sharing products between threads while the BLAS keeps to one."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from threadpoolctl import threadpool_info

from turboquant_mlx.kernels import blas
from turboquant_mlx.kernels.blas import one_thread, pieces_of, share


@pytest.fixture(autouse=True)
def libraries_of_now():
    """They are looked for once, and another test may have loaded one since (SciPy has its own)."""
    blas._libraries.cache_clear()


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


def test_a_thread_that_is_not_the_first_one_sets_the_number_too():
    """threadpoolctl heeds only the first that ever set one, as long as that thread lives."""
    with one_thread():
        pass
    inside = []

    def work():
        with one_thread():
            inside.extend(library.get() for library in blas._libraries())

    other = threading.Thread(target=work)
    other.start()
    other.join()
    assert set(inside) <= {1}


def test_the_last_thread_that_leaves_puts_the_number_back():
    before = blas_threads()
    entered, leave = threading.Event(), threading.Event()

    def work():
        with one_thread():
            entered.set()
            leave.wait()

    other = threading.Thread(target=work)
    with one_thread():
        other.start()
        entered.wait()
    counts = [library.get() for library in blas._libraries() if library.shared]
    leave.set()
    other.join()
    assert set(counts) <= {1}
    assert blas_threads() == before


def test_a_library_without_functions_that_we_know_is_left_to_threadpoolctl():
    class Controller:
        internal_api = "mkl"
        threads = 4

        def get_num_threads(self):
            return self.threads

        def set_num_threads(self, number):
            self.threads = number

    controller = Controller()
    assert blas._own_functions(controller) is None
    library = blas._by_controller(controller)
    library.set(3)
    assert library.get() == 3
    assert not library.shared


def test_threads_may_overlap():
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
