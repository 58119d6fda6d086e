"""Which back-end runs, and that it can be asked why."""

from __future__ import annotations

import threading

import mlx.core as mx
import pytest

from kernel_cases import ON_GPU, activation, packed
from turboquant_mlx.kernels import dispatch
from turboquant_mlx.kernels.dialect import stand_in
from turboquant_mlx.kernels.dispatch import backend, force_backend, why_backend
from turboquant_mlx.kernels.matmul import kernel_dialect, packed_matmul
from turboquant_mlx.quant.spec import QuantSpec

WEIGHT = packed(QuantSpec(bits=3, group_size=64), 5, 64)


def test_the_default_device_decides():
    if not ON_GPU:
        assert backend() == "cpu"
    else:
        assert backend() == ("metal" if mx.metal.is_available() else "cuda")


def test_a_gpu_machine_may_work_on_its_cpu():
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    try:
        assert backend() == "cpu"
    finally:
        mx.set_default_device(before)


@pytest.mark.skipif(ON_GPU, reason="pretends that there is a GPU")
@pytest.mark.parametrize("metal, cuda, name", [(1, 0, "metal"), (0, 1, "cuda"), (0, 0, "portable")])
def test_a_gpu_is_asked_for_its_dialect(metal, cuda, name, monkeypatch):
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu, 0))
    monkeypatch.setattr(mx.metal, "is_available", lambda: bool(metal))
    monkeypatch.setattr(mx.cuda, "is_available", lambda: bool(cuda))
    monkeypatch.setattr(dispatch, "_gpu_backend", dispatch._gpu_backend.__wrapped__)
    assert backend() == name
    assert why_backend().startswith(name)


def test_a_choice_may_be_forced_in_one_thread():
    seen = []
    with force_backend("portable"), force_backend("cuda"):
        assert backend() == "cuda"
        assert "chosen by the caller" in why_backend()
        thread = threading.Thread(target=lambda: seen.append(backend()))
        thread.start()
        thread.join()
    assert seen == [backend()]


@pytest.mark.skipif(ON_GPU, reason="about a machine without a GPU")
def test_the_reason_names_what_is_missing():
    assert why_backend() == "cpu (MLX finds no GPU; products by NumPy's BLAS)"


def test_back_ends_without_kernels_take_the_portable_way():
    def refuse(kernel, dialect):
        raise AssertionError("a kernel was called")

    x = activation(1, 64)
    for name in ("cpu", "portable"):
        with force_backend(name), stand_in(refuse):
            assert kernel_dialect(x, WEIGHT) is None
            mx.eval(packed_matmul(x, WEIGHT))


def test_what_kernels_do_not_take_goes_the_portable_way():
    with force_backend("metal"):
        assert kernel_dialect(activation(1, 64), WEIGHT) == "metal"
        assert kernel_dialect(mx.zeros((0, 64)), WEIGHT) is None
        assert kernel_dialect(mx.zeros((1, 64), mx.int32), WEIGHT) is None
        assert packed_matmul(mx.zeros((0, 64)), WEIGHT).shape == (0, 5)


def test_a_gradient_that_may_be_asked_for_is_noticed():
    x, seen = mx.ones(3), []

    def through(y):
        mx.eval(y)
        seen.append(dispatch.is_differentiated(y))
        return (y * y).sum()

    for dtype in (mx.float32, mx.bfloat16):
        through(x.astype(dtype))
        through(mx.ones((2, 5), dtype))
    assert seen == [False] * 4
    seen.clear()
    mx.grad(through)(x)
    mx.grad(lambda y: through(y * 2))(x)
    mx.vjp(lambda y: [through(y)], [x], [mx.array(1.0)])
    mx.jvp(lambda y: [through(y)], [x], [x])
    assert seen == [True] * 4
    mx.grad(lambda y: y.sum() + through(x))(x)
    assert seen[4:] == [False]  # not of this array


def test_is_traced_tells_values_from_promises():
    seen = []
    mx.eval(mx.compile(lambda x: seen.append(dispatch.is_traced(x)) or x * 2)(mx.ones(3)))
    assert seen == [True]
    assert not dispatch.is_traced(mx.ones(3))
