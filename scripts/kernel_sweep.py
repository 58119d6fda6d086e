"""Measures the numbers of kernels/selection.py: ``bench_kernels.py --sweep``.

    python scripts/kernel_sweep.py --rows 3 8 --shapes 14336x4096    launches alone, 3 bits
    python scripts/kernel_sweep.py --rows 8 --tile-unit 16           with shorter units of tiles

In the order of what matters most: launches of the matvec at 3 bits for one row and for more, the
thresholds between programs, MLX's own products, then 2 and 4 bits with the launches that were best
for 3. What the time does not suffice for is left out and counted. At the end stand the lines of
``MATVEC_LAUNCHES`` and of ``TILE_LAUNCHES`` (sixteen outputs of a warp or more) by these
measurements, where they gain something over the rule.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from typing import Any

import mlx.core as mx

from kernel_timing import (
    affine,
    affine_product,
    codes,
    copies,
    describe_machine,
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
    *((8, 1, 4), (8, 1, 8), (4, 1, 8), (8, 2, 8), (4, 2, 8), (4, 4, 8)),
    *((2, 1, 8), (2, 2, 8), (8, 4, 8), (4, 1, 4), (4, 2, 4), (2, 4, 8)),
]
FOR_A_SMALL = [(2, 1, 8), (2, 2, 8), (4, 1, 4), (4, 2, 8)]
FOR_ROWS = [(4, 1, 4), (4, 1, 8), (4, 2, 8), (2, 1, 8), (2, 2, 8), (8, 1, 4)]
FOR_TILES = [
    *((16, 4, 8), (16, 8, 8), (16, 8, 16), (16, 16, 16), (16, 4, 4), (16, 2, 8), (16, 4, 16)),
    *((32, 4, 8), (32, 8, 8), (32, 8, 16), (32, 4, 4), (32, 2, 8), (64, 8, 8)),
]
"""For several rows on CUDA. The table of a trellis is 32 KiB of each threadgroup's, so there many
warps of one count for more than many threadgroups."""

Cell = tuple[str, tuple[int, int], int, int]
"""Codec, shape, rows, bits."""


def launches(
    dialect: Dialect, shape: tuple[int, int], rows: int, tiles_of_one: bool = False
) -> list[Launch]:
    """What is tried at 3 bits; tiles for one row only if asked for."""
    if shape[0] < 2048:
        tried = FOR_A_SMALL
    else:
        tried = FOR_ONE_ROW if rows == 1 else FOR_ROWS
    if dialect == "cuda" and (rows > 1 or tiles_of_one):
        tried = tried + FOR_TILES
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
                found[cell] = measure(dialect, cell, launches(dialect, cell[1], cell[2]))
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
    lines = print_lines(dialect, found)
    print(f"left out for want of time: {left_out}; took {time.monotonic() - end + seconds:.0f} s")
    return {
        "launches": as_json(dialect, found),
        "stock": stock,
        "thresholds": thresholds,
        "table": lines,
        "left_out": left_out,
    }


def print_lines(dialect: Dialect, found: dict[Cell, dict[Launch, float]]) -> dict[str, list[str]]:
    """Prints the lines of both tables and returns them."""
    lines = {"MATVEC_LAUNCHES": table_lines(dialect, found, tiles=False)}
    if dialect == "cuda":
        lines["TILE_LAUNCHES"] = table_lines(dialect, found, tiles=True)
    for name, of_table in lines.items():
        print(f"\nlines of selection.{name}:", *of_table or ["(none)"], sep="\n    ")
    return lines


def as_json(dialect: Dialect, found: dict[Cell, dict[Launch, float]]) -> list[dict]:
    """The measurements, one launch of one cell each."""
    return [
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
    ]


def _spec(cell: Cell):
    codec, (_, width), _, bits = cell
    return codes(width)[f"{codec}{bits}"]


def _numbers(dialect: Dialect, cell: Cell, launch: Launch | None) -> dict[str, Any]:
    """The template arguments that ``matvec.plan`` makes."""
    _, (outputs, width), rows, _ = cell
    made = matvec.plan(
        _spec(cell), (outputs,), width, rows, mx.float16, mx.float16, dialect, launch
    )
    return dict(made.template)


def rule_launch(dialect: Dialect, cell: Cell, tiles: bool = False) -> Launch:
    """The launch without the table, of tiles or of others."""
    codec, (outputs, width), rows, _ = cell
    if tiles:
        unit = _numbers(dialect, cell, Launch(16, 1, 8))["UNIT"]
        return selection.tile_launch_by_rule(codec, outputs, width, 4 * unit)
    numbers = _numbers(dialect, cell, Launch(2, 1, 8))
    unit = numbers["UNIT"] * numbers["SPAN"]
    return selection.launch_by_rule(dialect, outputs, width, rows, unit)


def default_launch(dialect: Dialect, cell: Cell) -> Launch:
    """The launch as it is now."""
    numbers = _numbers(dialect, cell, None)
    return Launch(numbers["R"], numbers["SPLIT"], numbers["WARPS"])


def measure(dialect: Dialect, cell: Cell, tried: list[Launch]) -> dict[Launch, float]:
    """Seconds of these launches, the rule's and the present one; prints the best."""
    codec, (outputs, width), rows, bits = cell
    spec = _spec(cell)
    x = mx.random.normal((rows, width)).astype(mx.float16)
    weights = copies(
        lambda: random_weight(spec, outputs, width), spec.packed_bytes((outputs, width))
    )
    rule = rule_launch(dialect, cell)
    rules = [rule]
    if any(_is_of_tiles(dialect, launch) for launch in tried):
        rules.append(rule_launch(dialect, cell, tiles=True))
    taken: dict[Launch, float] = {}
    for launch in dict.fromkeys([*rules, default_launch(dialect, cell), *tried]):

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
    before = matmul.DECODED_BYTES[dialect]
    for mebibytes in (16, 32, 64, 128):
        if time.monotonic() > end:
            return results
        matmul.DECODED_BYTES[dialect] = mebibytes * 2**20
        try:
            ours = kernel_seconds(decoded, x, weights)
        finally:
            matmul.DECODED_BYTES[dialect] = before
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


def table_lines(dialect: Dialect, found: dict[Cell, dict[Launch, float]], tiles: bool) -> list[str]:
    """Lines of ``TILE_LAUNCHES`` or of the other: the launches with the least time for each class
    of sizes.

    Times of the widths of a code are compared by their ratio to the rule's.
    """
    lines = []
    for codec in CODECS:
        for shape in SHAPES:
            choices: list[tuple[int, Launch, float]] = []
            for rows in sorted({c[2] for c in found}):
                cells = [c for c in found if c[0] == codec and c[1] == shape and c[2] == rows]
                if any(_is_of_tiles(dialect, n) == tiles for c in cells for n in found[c]):
                    choices.append((rows, *_best(dialect, cells, found, tiles)))
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


def _is_of_tiles(dialect: Dialect, launch: Launch) -> bool:
    return dialect == "cuda" and launch.outputs >= 16


def _best(
    dialect: Dialect, cells: list[Cell], found: dict[Cell, dict[Launch, float]], tiles: bool
) -> tuple[Launch, float]:
    """The best launch for these cells together, and how many times as fast as the rule's it is."""
    rule = rule_launch(dialect, cells[0], tiles)  # the same for all bits
    gains = {}
    for launch in set.intersection(*(set(found[c]) for c in cells)):
        if _is_of_tiles(dialect, launch) != tiles:
            continue
        ratios = [math.log(found[c][rule] / found[c][launch]) for c in cells if rule in found[c]]
        if ratios:
            gains[launch] = math.exp(sum(ratios) / len(ratios))
    best = max(gains, key=lambda launch: gains[launch], default=rule)
    return (best, gains[best]) if gains.get(best, 1.0) > GAIN else (rule, 1.0)


def measure_launches(
    rows: list[int], shapes: list[tuple[int, int]], bits: int, seconds: float
) -> dict[str, Any]:
    """Launches alone, for chosen rows and shapes; printed, and for the JSON line."""
    dialect = backend()
    assert dialect == "metal" or dialect == "cuda"
    end = time.monotonic() + seconds
    found: dict[Cell, dict[Launch, float]] = {}
    cells = [(codec, shape, n, bits) for shape in shapes for n in rows for codec in CODECS]
    for cell in cells:
        if time.monotonic() < end:
            tried = launches(dialect, cell[1], cell[2], tiles_of_one=True)
            found[cell] = measure(dialect, cell, tried)
    lines = print_lines(dialect, found)
    print(f"left out for want of time: {len(cells) - len(found)}")
    return {"launches": as_json(dialect, found), "table": lines}


def main() -> None:
    parser = argparse.ArgumentParser(description="launches of the matvec, and the best of them")
    parser.add_argument("--rows", type=int, nargs="+", default=[8], help="of activations, 1 to 8")
    parser.add_argument("--shapes", nargs="+", metavar="OxI", help="such as 14336x4096")
    parser.add_argument("--bits", type=int, default=3, choices=(2, 3, 4))
    parser.add_argument("--seconds", type=float, default=SECONDS, help="(default %(default)s)")
    parser.add_argument("--tile-unit", type=int, choices=(8, 16, 32), help="instead of TILE_UNIT")
    args = parser.parse_args()
    if args.tile_unit:
        selection.TILE_UNIT = args.tile_unit
    shapes = SHAPES
    if args.shapes:
        shapes = [(int(o), int(i)) for o, _, i in (s.partition("x") for s in args.shapes)]
    print(describe_machine())
    print(f"{'O x I':>14} {'rows':>4} {'weight':<9} {'rule us':>8}  best launches, microseconds")
    print(json.dumps(measure_launches(args.rows, shapes, args.bits, args.seconds)))


if __name__ == "__main__":
    main()
