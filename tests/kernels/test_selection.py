"""The numbers by which launches are chosen, and what they must hold to."""

from __future__ import annotations

import pytest

from turboquant_mlx.kernels.selection import (
    MATVEC_LAUNCHES,
    MATVEC_ROWS,
    TABLE_BYTES,
    TILE_LAUNCHES,
    Launch,
    launch_by_rule,
    matvec_launch,
    size_class,
    table_copies,
    tile_launch,
)

DIALECTS = ["metal", "cuda"]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("codec", ["scalar", "trellis", "ternary"])
@pytest.mark.parametrize("rows", range(1, 9))
def test_a_launch_fits_any_kernel(dialect, codec, rows):
    for outputs in (1, 3, 64, 1024, 4096, 14336, 128256):
        for width in (32, 576, 4096, 14336):
            check_launch(dialect, codec, rows, outputs, width)


def check_launch(dialect, codec, rows, outputs, width):
    launch = matvec_launch(dialect, codec, outputs, width, rows, 16)
    for number in (launch.outputs, launch.split):
        assert number & (number - 1) == 0, "a power of two"
    assert launch.warps % launch.split == 0
    assert launch.outputs * 8 <= 64, "sums that a lane holds"
    assert launch.split <= -(-width // (32 * 16)), "no warp is idle"


def test_many_outputs_need_not_be_shared_and_few_are():
    large, small = (matvec_launch("cuda", "trellis", n, 4096, 1, 16) for n in (128256, 512))
    assert large.split == 1
    assert small.split > 1
    assert small.outputs < large.outputs


def test_experts_together_fill_a_gpu():
    alone, eight = (matvec_launch("cuda", "scalar", 768, 2048, 1, 16, n) for n in (1, 8))
    assert (eight.outputs, eight.split) != (alone.outputs, alone.split)
    assert eight.outputs >= alone.outputs


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("entries", [2, 16, 64, 256, 4096])
def test_tables_fit_their_memory(dialect, entries):
    for most in (8, 16, 32):
        size = entries * 4
        copies = table_copies(dialect, size, most)
        assert copies & (copies - 1) == 0
        assert copies <= most
        assert copies * size <= max(TABLE_BYTES[dialect], size) <= 32768


def test_the_table_holds_launches_that_a_kernel_takes():
    for lines in (*MATVEC_LAUNCHES.values(), TILE_LAUNCHES):
        for (codec, size), choices in lines.items():
            assert codec in ("scalar", "trellis", "ternary")
            assert size in ("small", "middle", "wide", "large", "huge")
            for rows, launch in choices.items():
                assert 1 <= rows <= MATVEC_ROWS
                for number in (launch.outputs, launch.split):
                    assert number & (number - 1) == 0
                assert launch.warps % launch.split == 0
                assert launch.warps * 32 <= 1024


def test_the_table_goes_before_the_rule(monkeypatch):
    line = {2: Launch(4, 1, 4), 8: Launch(2, 1, 4)}
    monkeypatch.setitem(MATVEC_LAUNCHES["metal"], ("scalar", "middle"), line)
    assert matvec_launch("metal", "scalar", 4096, 4096, 1, 16) == line[2]
    assert matvec_launch("metal", "scalar", 4096, 4096, 3, 16) == line[8]
    rule = launch_by_rule("metal", 4096, 4096, 1, 16)
    assert matvec_launch("metal", "trellis", 4096, 4096, 1, 16) == rule


@pytest.mark.parametrize("codec", ["scalar", "trellis"])
@pytest.mark.parametrize("step", [32, 64, 128])
def test_a_launch_of_tiles_fits_its_kernel(codec, step):
    for outputs in (1, 64, 1024, 4096, 14336, 128256):
        for width in (128, 576, 4096, 14336):
            check_tiles(tile_launch(codec, outputs, width, 8, step), width, step)


def check_tiles(launch, width, step):
    assert launch.outputs in (16, 32, 64)
    assert launch.split & (launch.split - 1) == 0, "a power of two"
    assert launch.warps % launch.split == 0
    assert launch.warps * 32 <= 1024
    assert launch.split == 1 or launch.split * step <= width, "no warp is idle"
    assert launch.outputs * launch.warps <= 512, "sums that shared memory holds beside the table"


def test_launches_of_tiles_that_were_measured():
    for choices in TILE_LAUNCHES.values():
        for launch in choices.values():
            check_tiles(launch, 2**14, 32)


def test_tiles_of_a_table_fit_smaller_weights(monkeypatch):
    monkeypatch.setitem(TILE_LAUNCHES, ("scalar", "small"), {8: Launch(32, 8, 8)})
    assert tile_launch("scalar", 1024, 4096, 5, 64) == Launch(32, 8, 8)
    assert tile_launch("scalar", 20, 4096, 5, 64) == Launch(16, 8, 8)
    assert tile_launch("scalar", 1024, 256, 5, 64) == Launch(32, 4, 8)


def test_few_tiles_are_shared_along_the_input():
    small, large = (tile_launch("scalar", n, 4096, 8, 64) for n in (4096, 128256))
    assert small.split > large.split
    assert small.outputs <= large.outputs


def test_classes_of_sizes():
    shapes = [(1536, 576), (4096, 4096), (4096, 14336), (14336, 4096), (128256, 4096)]
    assert [size_class(*shape) for shape in shapes] == ["small", "middle", "wide", "large", "huge"]
