"""The search for the best code stream of a bit-shift trellis.

A code of k bits with a window of L bits sees the stream through a window that slides k bits a
weight: window i is (window i-1) >> k with k new bits on top. What two neighbouring windows share is
the state, the low L - k bits; from each of its H = 2**(L - k) values lead 2**k windows, and at each
arrive 2**k. The stream with the least squared error is found by dynamic programming (A. Viterbi,
1967; for trellis-coded quantization M. Marcellin and T. Fischer, 1990; for this trellis QTIP, Tseng
et al., 2024). In the bits of a window, highest first,

    A (k bits) | B (L - 2k) | C (k)          state before: (B, C)    state after: (A, B)

so one step adds the costs of all windows to the costs of the states (B, C) and takes the minimum
over C. C is also the code that the weight adds to the stream.

Costs are whole numbers with C in their lowest k bits: the minimum then says by itself from where
the best path came, and sums and products are exact, whatever the order in which a BLAS adds and
whatever lanes are computed together. Weights and levels are rounded to 1/128 for this search, which
costs less than 0.1 % of the error. In NumPy the numbers are float32 between 2**23 and 2**24, where
the lowest bits of the number are those of its representation, and the costs of a step are one
small matrix product; in MLX they are int32.

The stream is circular, and a long one is cut into sections that are searched side by side. Both
need the state at some places in advance: it is taken from an open search over the OVERLAP weights
on either side. Against a search of all beginnings this costs 0.1 to 0.2 % of the error (a stream
that started and ended in a fixed state would lose 5 % at a width of 576).

Time runs along the first axis of all arrays here, independent streams ("lanes") along the last.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from .helpers import search_elsewhere
from .packing import array_module
from .threads import in_parallel

Array = Any  # np.ndarray or mx.array

GRID = 128.0  # steps per root mean square
LIMIT = 4.0  # weights beyond are searched as if they were this large
OVERLAP = 32
SECTION = {"numpy": 1024, "mlx": 256}  # longest section; a GPU wants many lanes
LANES = {"numpy": 256, "mlx": 16384}  # streams that are searched together

_BASE = 2.0**23  # of the costs in NumPy
_SLACK = 1024.0  # rounding may make a cost negative by a few units a step
_FORBIDDEN = 1 << 22  # cost of a state in which a stream must not start
_REBASE = 16  # steps after which the least cost is subtracted


@dataclass(frozen=True)
class Trellis:
    """A trellis as the search sees it.

    Attributes:
        bits: k.
        window: L.
        fan: 2**k, windows that leave or reach a state.
        states: H.
        levels: int32 [2**L], the table in grid units.
        squares: int32 [2**L], fan * (level**2 / 2) + C for each window.
        slopes: int32 [2**L], fan * level.
    """

    bits: int
    window: int
    fan: int
    states: int
    levels: np.ndarray
    squares: np.ndarray
    slopes: np.ndarray

    @property
    def middle(self) -> int:
        """2**(L - 2k), the number of values of B."""
        return self.states // self.fan


@lru_cache(maxsize=16)
def grid_trellis(levels: bytes, bits: int, window: int) -> Trellis:
    """The trellis of a table that is given as the bytes of int32 levels in grid units."""
    level = np.frombuffer(levels, np.int32)
    fan = 1 << bits
    low = np.arange(1 << window, dtype=np.int32) & (fan - 1)
    squares = fan * ((level * level + 1) // 2) + low
    return Trellis(bits, window, fan, 1 << (window - bits), level, squares, fan * level)


def make_trellis(levels: np.ndarray, bits: int, window: int) -> Trellis:
    """The trellis of a table.

    Args:
        levels: float32 [2**window], no larger than about 4.
        bits: bits that each weight adds to the stream; at most half a window.
        window: bits of a window.
    """
    grid = np.rint(levels * np.float32(GRID)).astype(np.int32)
    return grid_trellis(grid.tobytes(), bits, window)


def best_windows(x: Array, trellis: Trellis, tile: int = 0) -> Array:
    """The windows of the streams whose levels come closest to given weights.

    Args:
        x: float32 [n, lanes], NumPy or MLX, in units in which the levels are meant.
        trellis: which code.
        tile: weights per circular stretch, 0 for all n; divides n.

    Returns:
        uint8 [n, lanes], uint16 for windows of more than 8 bits: a window that
        ``packing.unpack_codes`` reads from the stream of their low ``bits`` bits, exactly.
    """
    xp = array_module(x)
    n, lanes = x.shape
    grid = xp.round(xp.clip(x, -LIMIT, LIMIT) * GRID)
    search, kind = (_numpy_search, "numpy") if xp is np else (_mlx_search, "mlx")
    sections = list(_sections(n, tile or n, SECTION[kind]))
    together = max(1, LANES[kind] // lanes)

    states: list[Array] = []
    near = np.stack([s.around for s in sections])
    for first in range(0, len(sections), together):
        part = _lanes_of(xp, [grid[xp.array(index)] for index in near[first : first + together]])
        state = search(trellis, part, None, None, OVERLAP)
        states += _split(xp, state, lanes)

    found: list[Array] = [None] * len(sections)
    for batch in _batches(sections, together):
        part = _lanes_of(xp, [grid[s.start : s.stop] for s in batch])
        start = xp.concatenate([states[s.number] for s in batch])
        end = xp.concatenate([states[s.following] for s in batch])
        codes = search(trellis, part, start, end, 0)
        for section, own in zip(batch, _split(xp, codes, lanes), strict=True):
            found[section.number] = own
    codes = found[0] if len(found) == 1 else xp.concatenate(found, axis=0)
    return _windows(xp, codes, trellis, tile or n)


def stretch_codes(
    x: np.ndarray, trellis: Trellis, start: np.ndarray | None, end: np.ndarray | None
) -> np.ndarray:
    """The best codes of one stretch of streams, for coders that go from stretch to stretch.

    Args:
        x: float32 [n, lanes], NumPy, in units in which the levels are meant.
        trellis: which code.
        start, end: integer states [lanes] before the first weight and after the last, which are
            the lowest window - bits bits of the windows there; None for any.

    Returns:
        uint8 [n, lanes].
    """
    grid = np.round(np.clip(x, -LIMIT, LIMIT) * np.float32(GRID))
    return _numpy_search(trellis, grid, start, end, 0)


@dataclass(frozen=True)
class _Section:
    """Weights start..stop-1 of a row, and the section of the same tile that comes next.

    Attributes:
        around: indices of the OVERLAP weights on either side of ``start``.
    """

    number: int
    start: int
    stop: int
    following: int
    around: np.ndarray


def _sections(n: int, tile: int, longest: int) -> Iterator[_Section]:
    count = -(-tile // longest)
    for number in range(n // tile * count):
        first, j = number // count * tile, number % count
        start, stop = tile * j // count, tile * (j + 1) // count
        around = first + (start + np.arange(-OVERLAP, OVERLAP)) % tile
        following = number - j + (j + 1) % count
        yield _Section(number, first + start, first + stop, following, around)


def _batches(sections: list[_Section], together: int) -> Iterator[list[_Section]]:
    """Sections of equal length, so many at a time."""
    by_length: dict[int, list[_Section]] = {}
    for section in sections:
        by_length.setdefault(section.stop - section.start, []).append(section)
    for equal in by_length.values():
        for first in range(0, len(equal), together):
            yield equal[first : first + together]


def _lanes_of(xp: Any, pieces: list[Array]) -> Array:
    return pieces[0] if len(pieces) == 1 else xp.concatenate(pieces, axis=1)


def _split(xp: Any, joined: Array, lanes: int) -> list[Array]:
    """The inverse of ``_lanes_of``."""
    return [joined[..., i : i + lanes] for i in range(0, joined.shape[-1], lanes)]


def _windows(xp: Any, codes: Array, trellis: Trellis, tile: int) -> Array:
    """The windows of a stream of codes: each code and those that follow it in its tile."""
    n, lanes = codes.shape
    k, window = trellis.bits, trellis.window
    dtype = xp.uint8 if window <= 8 else xp.uint16
    codes = codes.astype(dtype).reshape(n // tile, tile, lanes)
    result = codes
    for step in range(1, -(-window // k)):
        following = xp.roll(codes, -step, axis=1)
        result = result | (following << xp.array(step * k, dtype=dtype))  # drops bits beyond
    if window not in (8, 16):
        result = result & xp.array((1 << window) - 1, dtype=dtype)
    return result.reshape(n, lanes)


# ----------------------------------------------------------------------------------------- NumPy


@lru_cache(maxsize=16)
def _product(levels: bytes, slopes: bytes, window: int, bits: int) -> np.ndarray:
    """float32 [2**L, 3], windows in the order (C, A, B): times (1, x, x**2 / 2) their costs."""
    fan = 1 << bits
    order = np.arange(1 << window).reshape(-1, fan).T.reshape(-1)
    squares = np.frombuffer(levels, np.int32)[order]
    slope = np.frombuffer(slopes, np.int32)[order]
    columns = [squares, -slope, np.ones_like(squares)]
    return np.ascontiguousarray(np.stack(columns, axis=1), np.float32)


def _numpy_search(
    t: Trellis, grid: np.ndarray, start: np.ndarray | None, end: np.ndarray | None, stop: int
) -> np.ndarray:
    """``search_here``, or the same in another process where several threads search at once."""
    found = None
    if in_parallel():
        found = search_elsewhere(t.levels, t.bits, t.window, grid, start, end, stop)
    return search_here(t, grid, start, end, stop) if found is None else found


def search_here(
    t: Trellis, grid: np.ndarray, start: np.ndarray | None, end: np.ndarray | None, stop: int
) -> np.ndarray:
    """Search all lanes of ``grid`` [n, r], whole numbers in float32.

    Args:
        start, end: states [r] before the first and after the last weight; None for any.
        stop: where to stop tracing back.

    Returns:
        codes uint8 [n, r], or with ``stop`` the states [r] before weight ``stop``.
    """
    n, r = grid.shape
    origins, costs = _numpy_forward(t, grid, start)
    if end is None:
        end = costs.reshape(t.states, r).argmin(axis=0)
    # Position of (state, lane) in a row of origins; the state before has the code as its low bits
    # and the low bits of this one above.
    lane = np.arange(r)
    kept = (t.fan * (np.arange(t.states) % t.middle) * r)[:, None] + lane
    kept = kept.reshape(-1)
    place = end * r + lane
    codes = np.empty((n, r), np.uint8)
    rest = np.empty_like(place)
    for i in range(n - 1, stop - 1, -1):
        code = origins[i].take(place, out=codes[i], mode="clip")
        code &= t.fan - 1
        kept.take(place, out=rest, mode="clip")
        np.multiply(code, r, out=place, dtype=place.dtype)
        place += rest
    return place // r if stop else codes


def _numpy_forward(
    t: Trellis, grid: np.ndarray, start: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Lowest bytes of the costs of all states after each weight [n, states * r], and the last."""
    (n, r), fan, middle = grid.shape, t.fan, t.middle
    product = _product(t.squares.tobytes(), t.slopes.tobytes(), t.window, t.bits)
    factors = np.ones((n, 3, r), np.float32)
    factors[:, 1] = grid
    factors[:, 2] = np.floor(grid * grid * np.float32(0.5)) * np.float32(fan)

    origins = np.empty((n, t.states * r), np.uint8)
    costs = np.empty((fan * t.states, r), np.float32)  # (C, A, B)
    sums = costs.reshape(fan, fan, middle * r)
    choices = costs.reshape(fan, t.states * r)
    before = np.full((fan, middle, r), _BASE + _SLACK, np.float32)  # (C, B)
    if start is not None:
        before += np.float32(_FORBIDDEN)
        before[start % fan, start // fan, np.arange(r)] -= np.float32(_FORBIDDEN)
    added = before.reshape(fan, 1, middle * r)
    after = np.empty(t.states * r, np.float32)  # (A, B)
    number = after.view(np.int32)
    # (A, B) is the next (B, C)
    regrouped = number.reshape(middle, fan, r)
    target = before.view(np.int32).transpose(1, 0, 2)
    clear = np.int32(-fan)
    for i in range(n):
        np.matmul(product, factors[i], out=costs)
        np.add(sums, added, out=sums)
        np.minimum.reduce(choices, axis=0, out=after)
        origins[i] = number
        np.bitwise_and(regrouped, clear, out=target)
        if i % _REBASE == _REBASE - 1:
            least = np.minimum.reduce(before.reshape(-1, r), axis=0)
            least -= np.float32(_BASE + _SLACK)
            before -= least
    return origins, after


# ------------------------------------------------------------------------------------------- MLX

_UNROLLED = 16  # steps in one compiled function


@lru_cache(maxsize=16)
def _mlx_steps(squares: bytes, slopes: bytes, bits: int, window: int, steps: int) -> Any:
    """Compiled functions that go ``steps`` weights forward and back."""
    import mlx.core as mx

    fan, states = 1 << bits, 1 << (window - bits)
    middle = states // fan
    shape = (fan, middle, fan, 1)  # (A, B, C)
    square = mx.array(np.frombuffer(squares, np.int32)).reshape(shape)
    slope = mx.array(np.frombuffer(slopes, np.int32)).reshape(shape)

    def forward(before: mx.array, grid: mx.array) -> tuple[mx.array, mx.array]:
        origins = []
        before = before - before.min(axis=0, keepdims=True)
        for i in range(steps):
            x = grid[i]
            own = (x * x // 2) * fan
            costs = square - slope * x + before.reshape(1, middle, fan, -1)
            after = costs.min(axis=2).reshape(states, -1)
            code = after & (fan - 1)
            origins.append(code.astype(mx.uint8))
            before = after - code + own
        return before, mx.stack(origins)

    def backward(state: mx.array, origins: mx.array) -> tuple[mx.array, mx.array]:
        codes = []
        for i in range(steps - 1, -1, -1):
            code = mx.take_along_axis(origins[i], state[None], axis=0)[0]
            codes.append(code)
            state = ((state << bits) | code.astype(mx.int32)) & (states - 1)
        return state, mx.stack(codes[::-1])

    if mx.default_device().type == mx.DeviceType.cpu:  # where compiling takes a C++ compiler
        return forward, backward
    return mx.compile(forward), mx.compile(backward)


def _mlx_search(t: Trellis, grid: Any, start: Any, end: Any, stop: int) -> Any:
    """``search_here`` in MLX operations."""
    import mlx.core as mx

    n, r = grid.shape
    grid = grid.astype(mx.int32)
    before = mx.zeros((t.states, r), mx.int32)
    if start is not None:
        before = (mx.arange(t.states)[:, None] != start).astype(mx.int32) * _FORBIDDEN
    key = (t.squares.tobytes(), t.slopes.tobytes(), t.bits, t.window)
    cuts = [*range(0, stop, _UNROLLED), *range(stop, n, _UNROLLED), n]
    pieces = [slice(a, b) for a, b in itertools.pairwise(cuts)]
    origins = []
    for piece in pieces:
        forward, _ = _mlx_steps(*key, piece.stop - piece.start)
        before, origin = forward(before, grid[piece])
        mx.eval(before, origin)
        origins.append(origin)
    state = before.argmin(axis=0).astype(mx.int32) if end is None else end
    codes = []
    for piece, origin in zip(pieces[::-1], origins[::-1], strict=True):
        if piece.stop <= stop:
            break
        _, backward = _mlx_steps(*key, piece.stop - piece.start)
        state, code = backward(state, origin)
        mx.eval(state, code)
        codes.append(code)
    return state if stop else mx.concatenate(codes[::-1], axis=0)
