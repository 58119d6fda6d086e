"""Computes a little of everything on the user's own device and compares it with its reference.

For bug reports: each line names the back-end that answered, the largest relative error and the time
of one call. Inputs come from fixed seeds. Whatever one test raises, the others still run. Imports
MLX.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from .check import Check, failed, passed

WIDTH, ROWS, EXPERTS = 256, 128, 4
REPEATS = 5
# Largest relative errors that are no fault: of products in float32 and in bfloat16, and of exact
# transforms in float32.
PRODUCT_ERROR = 3e-2
EXACT_ERROR = 1e-5
CACHE_ERROR = 0.02
"""Relative squared error of keys and values at 8 bits; a broken cache has one of the order of 1."""


def self_test() -> list[Check]:
    """Rotation, packing, every kind of weight in every kind of product, and the cache."""
    checks = []
    for name, work in _tests():
        try:
            error, limit, seconds = work()
            where = _backend()
        except Exception as problem:  # whatever a driver or a compiler raises is the finding
            text = " ".join(str(problem).split()) or type(problem).__name__
            checks.append(failed(f"self.{name}", text, "please report this with the whole output"))
            continue
        message = f"{where}: error {error:.1e} of at most {limit:.0e}, {1e3 * seconds:.2f} ms"
        if error <= limit:
            checks.append(passed(f"self.{name}", message))
        else:
            hint = "please report this with the whole output"
            checks.append(failed(f"self.{name}", message, hint))
    return checks


Result = tuple[float, float, float]


def _tests() -> Iterator[tuple[str, Callable[[], Result]]]:
    from functools import partial

    yield "rotation", _rotation
    for bits in (2, 3, 4, 8):
        yield f"packing_{bits}", partial(_packing, bits)
    for label, spec in _specs().items():
        yield f"decode_{label}", partial(_decode, spec)
        for rows in (1, 4, 64):
            yield f"product_{label}_{rows}", partial(_product, spec, rows)
        yield f"experts_{label}", partial(_experts, spec)
    for label, width in (("64", 64), ("128", 128), ("80", 80)):
        yield f"cache_{label}", partial(_cache, width)
        for keys, values in ((8, 3), (3, 4)):
            yield f"attention_{label}_k{keys}v{values}", partial(_attention, width, keys, values)


def _backend() -> str:
    from ...kernels.dispatch import backend

    return backend()


def _specs() -> dict[str, Any]:
    from ...quant.spec import QuantSpec
    from ...quant.trellis_table import TRELLIS_WINDOW

    shared: dict[str, Any] = {"group_size": 64, "scale_layout": "log8", "rotation_block": WIDTH}
    specs = {f"scalar{bits}": QuantSpec(bits=bits, **shared) for bits in (2, 3, 4)}
    specs |= {
        f"trellis{bits}": QuantSpec(bits=bits, window_bits=TRELLIS_WINDOW, **shared)
        for bits in (2, 3, 4)
    }
    specs["ternary"] = QuantSpec(code="ternary", bits=2, **shared)
    return specs


def _rotation() -> Result:
    import mlx.core as mx

    from ...quant.rotation import random_signs, rotate, unrotate

    x = _normal((ROWS, WIDTH))
    signs = mx.array(random_signs(WIDTH, 1, "self-test")).astype(mx.float32)
    back = unrotate(rotate(x, WIDTH, signs), WIDTH, signs)
    seconds = _time(lambda: rotate(x, WIDTH, signs))
    return _distance(back, x), EXACT_ERROR, seconds


def _packing(bits: int) -> Result:
    import mlx.core as mx

    from ...quant.packing import pack_codes, unpack_codes

    codes = mx.random.randint(0, 2**bits, (ROWS, WIDTH), key=mx.random.key(bits))
    words = pack_codes(codes.astype(mx.uint32), bits)
    back = unpack_codes(words, bits, WIDTH)
    seconds = _time(lambda: unpack_codes(words, bits, WIDTH))
    wrong = bool(mx.any(back.astype(mx.int32) != codes.astype(mx.int32)).item())
    return float(wrong), 0.0, seconds


def _decode(spec: Any) -> Result:
    """The device's decoding against NumPy's."""
    import numpy as np

    from ...quant.weight import dequantize_numpy, dequantize_weight, quantize_weight

    packed = quantize_weight(_normal((ROWS, WIDTH)), spec)
    got = np.array(dequantize_weight(packed))
    wanted = dequantize_numpy(packed, 0, ROWS)
    error = float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))
    return error, EXACT_ERROR, _time(lambda: dequantize_weight(packed))


def _product(spec: Any, rows: int) -> Result:
    """A layer as the model uses it against the decoded weight."""
    import mlx.core as mx

    from ...quant.weight import dequantize_weight

    layer, packed = _layer(spec, (ROWS, WIDTH))
    x = _normal((rows, WIDTH)).astype(mx.bfloat16)
    wanted = x.astype(mx.float32) @ dequantize_weight(packed).T
    return _distance(layer(x), wanted), PRODUCT_ERROR, _time(lambda: layer(x))


def _experts(spec: Any) -> Result:
    import mlx.core as mx

    from ...quant.weight import dequantize_weight

    layer, packed = _layer(spec, (EXPERTS, ROWS, WIDTH))
    x = _normal((3, 1, 1, WIDTH)).astype(mx.bfloat16)
    indices = mx.array([[0, 3], [1, 2], [3, 1]])
    weights = dequantize_weight(packed)[indices]
    wanted = x.astype(mx.float32) @ weights.swapaxes(-1, -2)
    return _distance(layer(x, indices), wanted), PRODUCT_ERROR, _time(lambda: layer(x, indices))


def _layer(spec: Any, shape: tuple[int, ...]) -> tuple[Any, Any]:
    from ...layers.linear import TurboQuantLinear
    from ...layers.rotation_group import RotationGroup
    from ...layers.switch import TurboQuantSwitchLinear
    from ...quant.weight import quantize_weight

    packed = quantize_weight(_normal(shape), spec)
    kind: Any = TurboQuantSwitchLinear if len(shape) == 3 else TurboQuantLinear
    layer = kind(spec, shape, group=RotationGroup(WIDTH, spec.rotation_block))
    layer.load_weights(list(packed.arrays().items()))
    layer.eval()
    return layer, packed


def _cache(width: int) -> Result:
    """Keys and values at 8 bits come back nearly as they went in."""
    import mlx.core as mx

    from ...kvcache.cache import TurboQuantKVCache
    from ...kvcache.spec import KVSpec

    keys, values = _normal((1, 2, 96, width)), _normal((1, 2, 96, width))
    cache = TurboQuantKVCache(spec=KVSpec(8, 8))
    cache.update_and_fetch(keys, values)
    token = _normal((1, 2, 1, width))
    got_keys, got_values = cache.update_and_fetch(token, token)
    error = max(
        _distance(got_keys[:, :, :96], keys) ** 2, _distance(got_values[:, :, :96], values) ** 2
    )
    seconds = _time(lambda: mx.array(cache.keys_and_values()[0]))
    return error, CACHE_ERROR, seconds


def _attention(width: int, key_bits: int, value_bits: int) -> Result:
    """One query's attention over a packed cache, against plain attention over what it decodes to:
    a kernel on a GPU, the reference on a CPU."""
    import mlx.core as mx

    from ...kvcache.attend import attend
    from ...kvcache.cache import TurboQuantKVCache
    from ...kvcache.spec import KVSpec

    heads, tokens, scale = 2, 300, width**-0.5
    cache = TurboQuantKVCache(spec=KVSpec(key_bits, value_bits))
    shape = (1, heads, tokens, width)
    keys, values = (x.astype(mx.bfloat16) for x in (_normal(shape), _normal((*shape, 1))[..., 0]))
    cache.update_and_fetch(keys, values)
    queries = _normal((1, 2 * heads, 1, width)).astype(mx.bfloat16)
    decoded = [x.astype(mx.float32) for x in cache.store.decoded(tokens)]
    wide = [mx.repeat(x, 2, axis=1) for x in decoded]
    scores = scale * queries.astype(mx.float32) @ wide[0].swapaxes(-1, -2)
    wanted = mx.softmax(scores, axis=-1) @ wide[1]

    def work() -> Any:
        return attend(queries, cache.store, scale=scale)

    return _distance(work(), wanted), PRODUCT_ERROR, _time(work)


def _normal(shape: tuple[int, ...]) -> Any:
    import mlx.core as mx

    return mx.random.normal(shape, key=mx.random.key(sum(shape)))


def _distance(got: Any, wanted: Any) -> float:
    """Relative distance; infinite where a value is not a number."""
    import mlx.core as mx

    got, wanted = mx.array(got).astype(mx.float32), wanted.astype(mx.float32)
    error: Any = (mx.linalg.norm(got - wanted) / mx.linalg.norm(wanted)).item()
    return error if error == error else float("inf")


def _time(work: Callable[[], Any]) -> float:
    """Seconds of one call, the best of several."""
    import mlx.core as mx

    best = float("inf")
    for _ in range(REPEATS):
        start = time.perf_counter()
        mx.eval(work())
        best = min(best, time.perf_counter() - start)
    return best
