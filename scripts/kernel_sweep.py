"""Measures the numbers of kernels/selection.py: ``bench_kernels.py --sweep``.

In the order of what matters most: launches of the matvec at 3 bits for one row and for more, the
thresholds between programs, MLX's own products, then 2 and 4 bits with the launches that were best
for 3. What the time does not suffice for is left out and counted. At the end stand the lines of
``MATVEC_LAUNCHES`` by these measurements, where they gain something over ``launch_by_rule``.
"""

from __future__ import annotations

import math
import time
from typing import Any

import mlx.core as mx

from kernel_timing import (
    affine,
    affine_product,
    codes,
    copies,
    fp16,
    kernel_seconds,
    random_weight,
)
from turboquant_mlx.kernels import gather, matmul, matvec, selection
from turboquant_mlx.kernels.dialect import Dialect
from turboquant_mlx.kernels.dispatch import backend
from turboquant_mlx.kernels.rotate import rotate_few, rotate_many
from turboquant_mlx.kernels.selection import Launch
from turboquant_mlx.quant.rotation import rotate

SECONDS = 165.0
SHAPES = [(14336, 4096), (4096, 4096), (4096, 14336), (128256, 4096), (1536, 576)]
ROWS = (1, 4, 8)
CODECS = ("trellis", "scalar")
MATRIX = (14336, 4096)
STACK = (128, 768, 2048)
"""Experts, outputs and width of what the thresholds are measured with."""
GAIN = 1.03
"""By how much a launch must be faster than the rule's for a line in the table."""

FOR_ONE_ROW = [
    *((8, 1, 4), (8, 1, 8), (4, 1, 8), (8, 2, 8), (4, 2, 8), (4, 4, 8), (16, 1, 4)),
    *((2, 1, 8), (2, 2, 8), (8, 4, 8), (4, 1, 4), (4, 2, 4), (2, 4, 8)),
]
FOR_A_SMALL = [(2, 1, 8), (2, 2, 8), (4, 1, 4), (4, 2, 8)]
FOR_ROWS = [(4, 1, 4), (4, 1, 8), (4, 2, 8), (2, 1, 8), (2, 2, 8), (8, 1, 4)]

Cell = tuple[str, tuple[int, int], int, int]
"""Codec, shape, rows, bits."""


def launches(shape: tuple[int, int], rows: int) -> list[Launch]:
    """What is tried at 3 bits."""
    if shape[0] < 2048:
        tried = FOR_A_SMALL
    else:
        tried = FOR_ONE_ROW if rows == 1 else FOR_ROWS
    return [Launch(*numbers) for numbers in tried]


def sweep(seconds: float = SECONDS) -> dict[str, Any]:
    """All measurements that fit into the time, printed as they are made; for the JSON line."""
    dialect = backend()
    assert dialect == "metal" or dialect == "cuda"
    end = time.monotonic() + seconds
    found: dict[Cell, dict[Launch, float]] = {}
    stock: list[dict] = []

    def cells(bits: int) -> list[Cell]:
        return [(c, shape, rows, bits) for rows in ROWS for shape in SHAPES for c in CODECS]

    print(f"{'O x I':>14} {'rows':>4} {'weight':<9} {'rule us':>8}  best launches, microseconds")

    def measure_all(cells: list[Cell]) -> int:
        """How many there was no time for."""
        late = 0
        for cell in cells:
            if time.monotonic() > end:
                late += 1
            else:
                found[cell] = measure(dialect, cell, launches(cell[1], cell[2]))
        return late

    left_out = measure_all(cells(3))
    thresholds = measure_thresholds(dialect, end)
    for shape in SHAPES:
        if time.monotonic() < end:
            stock += measure_stock(shape)
    for cell in [*cells(2), *cells(4)]:
        codec, shape, rows, _ = cell
        like = found.get((codec, shape, rows, 3))
        if time.monotonic() > end or like is None:
            left_out += 1
            continue
        best = sorted(like, key=like.__getitem__)[:2]
        found[cell] = measure(dialect, cell, best)
    lines = table_lines(dialect, found)
    print("\nlines of selection.MATVEC_LAUNCHES:", *lines or ["(none)"], sep="\n    ")
    print(f"left out for want of time: {left_out}; took {time.monotonic() - end + seconds:.0f} s")
    return {
        "launches": [
            {
                "codec": codec,
                "shape": list(shape),
                "rows": rows,
                "bits": bits,
                "launch": [launch.outputs, launch.split, launch.warps],
                "is_default": launch == default_launch(dialect, (codec, shape, rows, bits)),
                "kernel_us": round(taken * 1e6, 2),
            }
            for (codec, shape, rows, bits), tried in found.items()
            for launch, taken in tried.items()
        ],
        "stock": stock,
        "thresholds": thresholds,
        "table": lines,
        "left_out": left_out,
    }


def _spec(cell: Cell):
    codec, (_, width), _, bits = cell
    return codes(width)[f"{codec}{bits}"]


def _unit(cell: Cell) -> int:
    """Weights that a lane takes before its warp may stop, as ``matvec.plan`` has it."""
    _, (outputs, width), rows, _ = cell
    made = matvec.plan(
        _spec(cell), (outputs,), width, rows, mx.float16, mx.float16, "cuda", Launch(2, 1, 8)
    )
    numbers = dict(made.template)
    return numbers["UNIT"] * numbers["SPAN"]


def rule_launch(dialect: Dialect, cell: Cell) -> Launch:
    """The launch without the table."""
    _, (outputs, width), rows, _ = cell
    return selection.launch_by_rule(dialect, outputs, width, rows, _unit(cell))


def default_launch(dialect: Dialect, cell: Cell) -> Launch:
    """The launch as it is now."""
    codec, (outputs, width), rows, _ = cell
    return selection.matvec_launch(dialect, codec, outputs, width, rows, _unit(cell))


def measure(dialect: Dialect, cell: Cell, tried: list[Launch]) -> dict[Launch, float]:
    """Seconds of these launches, the rule's and the present one; prints the best."""
    codec, (outputs, width), rows, bits = cell
    spec = _spec(cell)
    x = mx.random.normal((rows, width)).astype(mx.float16)
    weights = copies(
        lambda: random_weight(spec, outputs, width), spec.packed_bytes((outputs, width))
    )
    rule = rule_launch(dialect, cell)
    taken: dict[Launch, float] = {}
    for launch in dict.fromkeys([rule, default_launch(dialect, cell), *tried]):

        def product(x, weight, launch=launch):
            return matvec.matvec(x, weight, dialect, launch=launch)

        try:
            # times are differences, and may be nothing on a slow host
            taken[launch] = max(1e-8, kernel_seconds(product, x, weights))
        except (RuntimeError, ValueError) as error:
            print(f"{launch}: {str(error).splitlines()[0]}")
    best = sorted(taken, key=taken.__getitem__)[:4]
    shown = ", ".join(f"{n.outputs}/{n.split}/{n.warps} {taken[n] * 1e6:.1f}" for n in best)
    size = f"{outputs} x {width}"
    of_rule = taken.get(rule, math.nan) * 1e6
    print(f"{size:>14} {rows:>4} {codec + str(bits):<9} {of_rule:>8.1f}  {shown}", flush=True)
    return taken


def measure_stock(shape: tuple[int, int]) -> list[dict]:
    """MLX's own products at the same shapes."""
    outputs, width = shape
    results = []
    numbers = outputs * width
    for name, bits in (("fp16", 16), ("affine4", 4), ("affine3", 3), ("affine2", 2)):
        if bits == 16:
            weights = copies(lambda: fp16(outputs, width), 2 * numbers)
        else:
            weights = copies(lambda b=bits: affine(outputs, width, b), numbers * bits // 8)
        for rows in ROWS:
            x = mx.random.normal((rows, width)).astype(mx.float16)
            product = affine_product(bits) if bits < 16 else lambda x, w: x @ w.T
            taken = kernel_seconds(product, x, weights)
            results.append(
                {
                    "shape": [outputs, width],
                    "rows": rows,
                    "weight": name,
                    "kernel_us": round(taken * 1e6, 2),
                }
            )
    shown = ", ".join(f"{r['weight']}/{r['rows']} {r['kernel_us']:.1f}" for r in results)
    print(f"{outputs} x {width}, MLX's own (weight/rows microseconds): {shown}", flush=True)
    return results


def measure_thresholds(dialect: Dialect, end: float) -> list[dict]:
    """From where on another program is faster, for the other numbers of selection.py."""
    results: list[dict] = []

    def note(what: str, at: int, **seconds: float) -> None:
        times = {name: round(taken * 1e6, 2) for name, taken in seconds.items()}
        shown = ", ".join(f"{name} {us:.1f}" for name, us in times.items())
        print(f"{what} {at}: {shown}", flush=True)
        results.append({"what": what, "at": at, "kernel_us": times})

    outputs, width = MATRIX
    spec = codes(width)["trellis3"]
    block = spec.rotation_block
    signs = [mx.ones((width,), mx.float16) for _ in range(2)]
    for rows in (1, 8, 64, 512, 4096):
        if time.monotonic() > end:
            return results
        x = mx.random.normal((rows, width)).astype(mx.float16)
        few = kernel_seconds(lambda x, m: rotate_few(x, block, m, dialect), x, signs)
        many = kernel_seconds(lambda x, m: rotate_many(x, block, m, dialect), x, signs)
        plain = kernel_seconds(lambda x, m: rotate(x, block, m), x, signs)
        note("rotation, rows", rows, few=few, many=many, mlx=plain)

    def decoded(x, weight):
        blocks = matmul.dense_blocks(weight, x.dtype, dialect)
        parts = [x @ dense.T for dense, _, _ in blocks]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)

    weights = copies(lambda: random_weight(spec, *MATRIX), spec.packed_bytes(MATRIX))
    for rows in (4, 8, 16):
        if time.monotonic() > end:
            return results
        x = mx.random.normal((rows, width)).astype(mx.float16)

        def direct(x, weight):
            parts = [matvec.matvec(x[i : i + 8], weight, dialect) for i in range(0, len(x), 8)]
            return parts[0] if len(parts) == 1 else mx.concatenate(parts)

        times = {"direct": kernel_seconds(direct, x, weights)}
        times["decoded"] = kernel_seconds(decoded, x, weights)
        note(f"{outputs} x {width}, rows", rows, **times)

    x = mx.random.normal((512, width)).astype(mx.float16)
    before = matmul.DECODED_BYTES
    for mebibytes in (16, 32, 64, 128):
        if time.monotonic() > end:
            return results
        matmul.DECODED_BYTES = mebibytes * 2**20
        try:
            ours = kernel_seconds(decoded, x, weights)
        finally:
            matmul.DECODED_BYTES = before
        note(f"{outputs} x {width}, 512 rows, decoded MiB", mebibytes, ours=ours)
    whole = [fp16(outputs, width) for _ in range(2)]
    note(f"{outputs} x {width}, rows", 512, fp16=kernel_seconds(lambda x, w: x @ w.T, x, whole))
    del weights, whole

    experts, _, width = STACK
    stacks = [random_weight(codes(width)["trellis3"], *STACK) for _ in range(2)]
    for entries in (8, 64, 128, 256, 512, 1024):
        if time.monotonic() > end:
            return results
        x = mx.random.normal((entries, 1, width)).astype(mx.float16)
        indices = mx.sort(mx.random.randint(0, experts, (entries,))).astype(mx.uint32)

        def direct(x, weight, indices=indices):
            return gather.gather_matvec(x[:, 0], weight, indices, dialect)[:, None]

        def blocks(x, weight, indices=indices):
            return gather.decoded_gather(x, weight, indices, True, False, dialect)

        times = {"direct": kernel_seconds(direct, x, stacks)}
        times["decoded"] = kernel_seconds(blocks, x, stacks)
        note("experts, pairs", entries, **times)
    return results


def table_lines(dialect: Dialect, found: dict[Cell, dict[Launch, float]]) -> list[str]:
    """Lines of ``MATVEC_LAUNCHES``: for each class of sizes the launches with the least time.

    Times of the widths of a code are compared by their ratio to the rule's.
    """
    lines = []
    for codec in CODECS:
        for shape in SHAPES:
            choices: list[tuple[int, Launch, float]] = []
            for rows in ROWS:
                cells = [c for c in found if c[0] == codec and c[1] == shape and c[2] == rows]
                if cells:
                    choices.append((rows, *_best(dialect, cells, found)))
            while choices and choices[-1][2] == 1.0:
                choices.pop()  # the rule's is the best from here on
            if choices:
                inner = ", ".join(
                    f"{rows}: Launch({n.outputs}, {n.split}, {n.warps})" for rows, n, _ in choices
                )
                said = ", ".join(f"{gain:.2f}" for *_, gain in choices)
                size = selection.size_class(*shape)
                lines.append(f'("{codec}", "{size}"): {{{inner}}},  # {said} x the rule')
    return lines


def _best(
    dialect: Dialect, cells: list[Cell], found: dict[Cell, dict[Launch, float]]
) -> tuple[Launch, float]:
    """The best launch for these cells together, and how many times as fast as the rule's it is."""
    rule = rule_launch(dialect, cells[0])  # the same for all bits
    gains = {}
    for launch in set.intersection(*(set(found[c]) for c in cells)):
        ratios = [math.log(found[c][rule] / found[c][launch]) for c in cells if rule in found[c]]
        if ratios:
            gains[launch] = math.exp(sum(ratios) / len(ratios))
    best = max(gains, key=lambda launch: gains[launch], default=rule)
    return (best, gains[best]) if gains.get(best, 1.0) > GAIN else (rule, 1.0)
