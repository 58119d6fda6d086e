"""Random packed weights and how long products with them take, for the benchmarks of kernels.

See bench_kernels.py for what the two kinds of times mean.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.core as mx

from gpu_clock import gpu_seconds, has_gpu_clock
from turboquant_mlx.errors import TurboQuantError
from turboquant_mlx.kernels.dispatch import backend, why_backend
from turboquant_mlx.quant.rotation import block_size
from turboquant_mlx.quant.spec import QuantSpec
from turboquant_mlx.quant.weight import PackedWeight

CACHE_BYTES = 192 * 2**20  # more than any second-level cache
MOST_COPIES = 12
REPEATS = 9

Product = Callable[[mx.array, Any], mx.array]


def describe_machine(any_device: bool = False) -> str:
    """The device, MLX's version and the system.

    Raises:
        TurboQuantError: there is no GPU, and ``any_device`` will not do.
    """
    if backend() not in ("metal", "cuda") and not any_device:
        raise TurboQuantError("this needs a GPU", hint=f"the back-end is {why_backend()}")
    machine = f"{mx.default_device()}, MLX {mx.__version__}, {platform.platform()}"
    return machine if backend() == "cpu" else f"{mx.device_info()['device_name']}, {machine}"


def codes(width: int) -> dict[str, QuantSpec]:
    """The codes that are measured, by name."""
    block = block_size(width)
    found = {
        f"trellis{bits}": QuantSpec(
            bits=bits, window_bits=8, group_size=block, scale_layout="log8", rotation_block=block
        )
        for bits in (3, 2, 4)
    }
    for bits in (3, 2, 4):
        found[f"scalar{bits}"] = QuantSpec(bits=bits, group_size=64, rotation_block=block)
    found["ternary"] = QuantSpec(code="ternary", group_size=64, rotation_block=block)
    return found


def random_weight(spec: QuantSpec, *shape: int) -> PackedWeight:
    *rows, width = shape
    groups = (*rows, width // spec.group_size)
    if spec.scale_layout == "log8":
        scales = mx.random.randint(180, 241, groups).astype(mx.uint8)
    else:
        scales = mx.random.uniform(0.1, 1, groups).astype(mx.float16)
    weight = PackedWeight(
        spec=spec,
        shape=shape,
        codes=random_codes(spec, *rows, spec.words_per_row(width)),
        scales=scales,
        table=mx.random.normal((spec.table_size,)),
        multiplier=mx.ones((width,), mx.float16),
    )
    mx.eval(weight.arrays())
    return weight


def random_codes(spec: QuantSpec, *shape: int) -> mx.array:
    if spec.code == "ternary":
        return mx.random.randint(0, 2**31 - 1, shape).astype(mx.uint32)  # below 3**20
    return random_words(*shape)


def random_words(*shape: int) -> mx.array:
    halves = [mx.random.randint(0, 2**16, shape).astype(mx.uint32) for _ in range(2)]
    return halves[0] * 65536 + halves[1]


def median_seconds(run: Callable[[], Any]) -> float:
    for _ in range(2):
        mx.eval(run())
    mx.synchronize()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        mx.eval(run())
        mx.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def clock() -> str:
    """Whose time ``seconds_of_a_graph`` tells."""
    return "the GPU's profiler" if has_gpu_clock() else "the host"


def seconds_of_a_graph(run: Callable[[], Any]) -> float:
    """Seconds of a compiled graph whose operations need each other: the GPU's where its profiler is
    at hand, or else the host's until all is done."""
    return gpu_seconds(run) if has_gpu_clock() else median_seconds(run)


def kernel_seconds(product: Product, x: mx.array, weights: list) -> float:
    """Per product in a graph where each needs the one before it, see ``seconds_of_a_graph``."""
    loops = max(1, 24 // len(weights))
    steps = loops * len(weights)

    @mx.compile
    def chain(x):
        for weight in weights * loops:
            x = x + product(x, weight)[..., :1] * 0
        return x

    return (seconds_of_a_graph(lambda: chain(x)) - empty_seconds(x.shape, steps)) / steps


@cache
def empty_seconds(shape: tuple[int, ...], steps: int) -> float:
    """What the graph of ``kernel_seconds`` takes without products."""
    x = mx.zeros(shape, mx.float16)

    @mx.compile
    def empty(x):
        for _ in range(steps):
            x = x + x[..., 1:2] * 0
        return x

    return seconds_of_a_graph(lambda: empty(x))


def called_seconds(product: Product, x: mx.array, weights: list) -> float:
    """Per product, called from Python one after the other."""
    loops = max(1, 24 // len(weights))

    def run():
        return [product(x, weight) for weight in weights * loops]

    return median_seconds(run) / (loops * len(weights))


def copies(make: Callable[[], Any], n_bytes: int) -> list:
    return [make() for _ in range(max(2, min(MOST_COPIES, -(-CACHE_BYTES // n_bytes))))]


def fp16(outputs: int, width: int) -> mx.array:
    weight = mx.random.normal((outputs, width)).astype(mx.float16)
    mx.eval(weight)
    return weight


def affine(outputs: int, width: int, bits: int) -> tuple:
    made = mx.quantize(fp16(outputs, width), group_size=64, bits=bits)
    mx.eval(made)
    return tuple(made)


def affine_product(bits: int) -> Product:
    def product(x, weight):
        return mx.quantized_matmul(x, *weight, transpose=True, group_size=64, bits=bits)

    return product
