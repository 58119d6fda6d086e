#!/usr/bin/env python3
"""How fast the GPU kernels are, beside MLX's own products in the same run.

Decoding a token is bound by reading weights, so one row is compared with MLX's fp16 product and
its affine quantization at every shape; more rows show verification, batches and prefill.

``kernel`` times are per call inside one compiled graph in which every product waits for the one
before it, less the same graph without products, by the GPU's own clock where PyTorch for CUDA is
installed (gpu_clock.py) and by the host's elsewhere; ``called`` times are per call from Python.
Weights go through more copies than a GPU's second-level cache holds. Every figure is a median.

    python scripts/bench_kernels.py             all tables, about three minutes on one H200
    python scripts/bench_kernels.py --quick     one row, two shapes
    python scripts/bench_kernels.py --sweep     the numbers of kernels/selection.py, in 3 minutes

The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from kernel_sweep import SECONDS, sweep
from kernel_timing import (
    Product,
    affine,
    affine_product,
    called_seconds,
    clock,
    codes,
    copies,
    fp16,
    kernel_seconds,
    median_seconds,
    random_weight,
)
from turboquant_mlx.kernels.dispatch import backend, why_backend
from turboquant_mlx.kernels.gather import gather_matmul
from turboquant_mlx.kernels.matmul import packed_matmul, portable_matmul
from turboquant_mlx.kernels.matvec import joint_matvec
from turboquant_mlx.kernels.rotate import rotate_few
from turboquant_mlx.quant.rotation import rotate

SHAPES = [(4096, 4096), (14336, 4096), (4096, 14336), (128256, 4096), (576, 1536), (1536, 576)]
QUICK = [(14336, 4096), (128256, 4096)]


def candidates(outputs: int, width: int) -> list[tuple[str, Product, Callable[[], Any], int]]:
    """Name, product, maker of a weight, bytes of one."""
    numbers = outputs * width
    found: list[tuple[str, Product, Callable[[], Any], int]] = [
        ("fp16", lambda x, w: x @ w.T, lambda: fp16(outputs, width), 2 * numbers)
    ]
    for bits in (4, 3, 2):
        n_bytes = numbers * bits // 8 + numbers // 64 * 4
        found.append(
            (
                f"affine{bits}",
                affine_product(bits),
                lambda b=bits: affine(outputs, width, b),
                n_bytes,
            )
        )
    for name, spec in codes(width).items():
        n_bytes = spec.packed_bytes((outputs, width))
        found.append(
            (name, packed_matmul, lambda s=spec: random_weight(s, outputs, width), n_bytes)
        )
    return found


def check(outputs: int, width: int) -> float:
    """The largest relative distance of our product from the reference, over codes and rows."""
    worst = 0.0
    for spec in codes(width).values():
        weight = random_weight(spec, min(outputs, 300), width)
        for rows in (1, 8, 40):
            x = mx.random.normal((rows, width)).astype(mx.float16)
            want = portable_matmul(x.astype(mx.float32), weight)
            distance = mx.linalg.norm(packed_matmul(x, weight) - want) / mx.linalg.norm(want)
            worst = max(worst, float(distance))
    return worst


def copy_bandwidth() -> float:
    """Bytes per second that a copy reads and writes."""
    x = mx.zeros((2**28,), mx.float32)
    mx.eval(x)
    return 2 * x.nbytes / median_seconds(lambda: x + 1)


def measure(shapes: list, rows: list[int], bandwidth: float) -> list[dict]:
    """A table of products at these shapes and numbers of rows, printed as it grows."""
    results = []
    for outputs, width in shapes:
        print(f"\n{outputs} x {width}, error {check(outputs, width):.1e}")
        print(
            f"{'rows':>5} {'weight':<9} {'kernel us':>9} {'called us':>9} {'GB/s':>6}"
            f" {'of copy':>7} {'x fp16':>7} {'x affine4':>9}"
        )
        for n_rows in rows:
            x = mx.random.normal((n_rows, width)).astype(mx.float16)
            seen: dict[str, float] = {}
            for name, product, make, n_bytes in candidates(outputs, width):
                weights = copies(make, n_bytes)
                kernel = kernel_seconds(product, x, weights)
                called = called_seconds(product, x, weights)
                del weights
                seen[name] = kernel
                rate = n_bytes / kernel
                print(
                    f"{n_rows:>5} {name:<9} {kernel * 1e6:>9.1f} {called * 1e6:>9.1f}"
                    f" {rate / 1e9:>6.0f} {rate / bandwidth:>7.0%}"
                    f" {seen['fp16'] / kernel:>7.2f} {seen.get('affine4', kernel) / kernel:>9.2f}",
                    flush=True,
                )
                results.append(
                    {
                        "shape": [outputs, width],
                        "rows": n_rows,
                        "weight": name,
                        "kernel_us": round(kernel * 1e6, 2),
                        "called_us": round(called * 1e6, 2),
                        "bytes": n_bytes,
                    }
                )
    return results


def measure_experts() -> list[dict]:
    """One token through 8 of 128 experts, against affine 4-bit; [E, O, I] = [128, 768, 2048]."""
    experts, outputs, width = 128, 768, 2048
    x = mx.random.normal((1, 1, 1, width)).astype(mx.float16)
    indices = mx.array([[3, 90, 17, 55, 101, 64, 8, 120]], mx.uint32)
    results = []

    def affine_experts(x, weight):
        return mx.gather_qmm(
            x, *weight, rhs_indices=indices, transpose=True, group_size=64, bits=4
        ).reshape(1, -1)

    def ours(x, weight):
        return gather_matmul(x, weight, indices).reshape(1, -1)

    def affine_stack():
        dense = mx.random.normal((experts, outputs, width)).astype(mx.float16)
        made = tuple(mx.quantize(dense, group_size=64, bits=4))
        mx.eval(made)
        return made

    print("\n8 of 128 experts, 768 x 2048")
    for name, product, make in [("affine4", affine_experts, affine_stack)] + [
        (name, ours, lambda s=spec: random_weight(s, experts, outputs, width))
        for name, spec in codes(width).items()
    ]:
        weights = [make() for _ in range(4)]
        kernel = kernel_seconds(product, x, weights)
        called = called_seconds(product, x, weights)
        print(f"      {name:<9} {kernel * 1e6:>9.1f} {called * 1e6:>9.1f}", flush=True)
        results.append(
            {
                "experts": [experts, outputs, width],
                "weight": name,
                "kernel_us": round(kernel * 1e6, 2),
                "called_us": round(called * 1e6, 2),
            }
        )
    return results


def measure_launches() -> list[dict]:
    """What fewer launches gain: the rotation in one, and q, k and v of an 8B model in one."""
    choice = backend()
    assert choice == "metal" or choice == "cuda"
    width = 4096
    x = mx.random.normal((1, width)).astype(mx.float16)
    spec = codes(width)["trellis3"]
    block = spec.rotation_block
    signs = [mx.ones((width,), mx.float16) for _ in range(2)]
    layers = [
        [random_weight(spec, outputs, width) for outputs in (4096, 1024, 1024)] for _ in range(4)
    ]

    def apart(x, weights):
        return mx.concatenate([packed_matmul(x, weight) for weight in weights], axis=-1)

    def together(x, weights):
        return mx.concatenate(joint_matvec(x, weights, choice), axis=-1)

    results = []
    print("\nlaunches, one activation of 4096 values")
    for name, product, arguments in [
        ("rotation, plain MLX", lambda x, m: rotate(x, block, m), signs),
        ("rotation, kernel", lambda x, m: rotate_few(x, block, m, choice), signs),
        ("q, k, v apart", apart, layers),
        ("q, k, v together", together, layers),
    ]:
        kernel = kernel_seconds(product, x, arguments)
        called = called_seconds(product, x, arguments)
        print(f"      {name:<20} {kernel * 1e6:>9.1f} {called * 1e6:>9.1f}", flush=True)
        results.append(
            {
                "launches": name,
                "kernel_us": round(kernel * 1e6, 2),
                "called_us": round(called * 1e6, 2),
            }
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two shapes, one row")
    parser.add_argument("--sweep", action="store_true", help="measure what selection.py holds")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="the sweep stops then (default %(default)s)"
    )
    parser.add_argument("--rows", type=int, nargs="+", help="rows of activations")
    parser.add_argument("--shapes", nargs="+", metavar="OxI", help="such as 14336x4096")
    args = parser.parse_args()

    report: dict[str, Any] = {
        "mlx": mx.__version__,
        "backend": backend(),
        "machine": platform.platform(),
        "clock": clock(),
        "device": mx.device_info().get("device_name") if hasattr(mx, "device_info") else None,
    }
    print(
        f"back-end: {why_backend()}; MLX {mx.__version__}; device {report['device']};"
        f" kernel times by {clock()}"
    )
    if backend() not in ("metal", "cuda"):
        print("There is no GPU here: nothing is measured.")
        print(json.dumps(report))
        return
    shapes: list = QUICK if args.quick else SHAPES
    if args.shapes:
        shapes = [tuple(int(n) for n in shape.split("x")) for shape in args.shapes]
    if args.sweep:
        report |= sweep(args.seconds)
    else:
        bandwidth = copy_bandwidth()
        print(f"a copy moves {bandwidth / 1e12:.2f} TB/s")
        report["copy_bytes_per_second"] = bandwidth
        report["products"] = measure(shapes, args.rows or [1], bandwidth)
        if not args.quick and not args.rows:
            wide = [s for s in shapes if s[0] * s[1] > 2**24]
            report["products"] += measure(wide, [8, 64, 512], bandwidth)
            report["experts"] = measure_experts()
            report["launches"] = measure_launches()
    print(json.dumps(report))


if __name__ == "__main__":
    main()
