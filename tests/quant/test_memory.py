"""Memory stays bounded: no second copy of a tensor, in float32 least of all."""

from __future__ import annotations

import tracemalloc

import mlx.core as mx
import numpy as np
import pytest

from turboquant_mlx.quant import packed as packed_module
from turboquant_mlx.quant.spec import QuantSpec
from turboquant_mlx.quant.weight import dequantize_weight, quantize_weight

MB = 1 << 20
SHAPE = (16, 512, 1536)  # 12.6 million weights: 24 MB in bfloat16, 48 MB in float32


@pytest.fixture(scope="module")
def stack() -> mx.array:
    w = mx.random.normal(SHAPE, key=mx.random.key(0)).astype(mx.bfloat16)
    mx.eval(w)
    return w


@pytest.mark.parametrize("threads", [1, 2])
def test_numpy_quantizing_holds_only_the_result_and_a_few_chunks(stack, threads):
    spec = QuantSpec(bits=3, rotation_block=512)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    tracemalloc.start()
    made = quantize_weight(stack, spec, threads=threads, backend="numpy")
    _, peak = tracemalloc.get_traced_memory()  # NumPy's arrays
    tracemalloc.stop()
    # codes, and scales in float32 until their exponent is known; 13 MB of temporaries a thread
    result = made.nbytes + 4 * made.scales.size
    assert peak < result + 13 * MB * threads
    assert mx.get_peak_memory() - before < made.nbytes + MB


@pytest.mark.parametrize("threads", [1, 2])
def test_a_trellis_search_holds_a_few_sections(stack, threads):
    spec = QuantSpec(bits=3, window_bits=8, group_size=512, rotation_block=512)
    tracemalloc.start()
    made = quantize_weight(stack[:4], spec, threads=threads, backend="numpy")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < made.nbytes + 4 * made.scales.size + 30 * MB * threads


def test_mlx_quantizing_holds_a_few_blocks(monkeypatch, stack):
    monkeypatch.setattr(packed_module, "BLOCK_BYTES", MB)
    w = stack[:4]
    mx.eval(w)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    made = quantize_weight(w, QuantSpec(bits=3, rotation_block=512, qjl=True), backend="mlx")
    assert mx.get_peak_memory() - before < made.nbytes + 6 * MB


def test_numpy_decoding_holds_only_the_result_and_one_block(monkeypatch, stack):
    made = quantize_weight(stack, QuantSpec(bits=3, rotation_block=512))
    monkeypatch.setattr(packed_module, "BLOCK_BYTES", 2 * MB)
    tracemalloc.start()
    decoded = dequantize_weight(made, dtype=mx.bfloat16, threads=1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert decoded.shape == SHAPE
    assert peak < 2 * MB + 10 * MB


@pytest.mark.parametrize("backend", ["numpy", "mlx"])
def test_decoding_never_holds_the_whole_in_float32(monkeypatch, stack, backend):
    made = quantize_weight(stack[:8], QuantSpec(bits=3, rotation_block=512))
    monkeypatch.setattr(packed_module, "BLOCK_BYTES", MB)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    decoded = dequantize_weight(made, dtype=mx.bfloat16, backend=backend)
    mx.eval(decoded)
    # the blocks and the whole that they are joined to, in bfloat16
    assert mx.get_peak_memory() - before < 2 * decoded.nbytes + 8 * MB


def test_the_source_is_viewed_not_copied():
    w = mx.zeros((64, 64), mx.bfloat16)
    view = np.array(w.view(mx.uint16), copy=False)
    assert view.base is not None
