"""Whatever rows join, leave, grow and are cut, each stays what it would be alone."""

from __future__ import annotations

import copy

import mlx.core as mx
import numpy as np
import pytest

from turboquant_mlx.kvcache.cache import TurboQuantKVCache
from turboquant_mlx.kvcache.rotating import TurboQuantRotatingKVCache
from turboquant_mlx.kvcache.spec import KVSpec

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

HEADS, WIDTH, LONGEST, WINDOW, KEEP = 1, 16, 400, 48, 3
SPECS = [
    KVSpec(4, 3),
    KVSpec(2, 2, min_tokens=0),
    KVSpec(4, 4, start=45, min_tokens=3),
    KVSpec(8, 8),
]


def sequence(seed: int) -> np.ndarray:
    """Keys and values [2, HEADS, LONGEST, WIDTH] of one row."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((2, HEADS, LONGEST, WIDTH))
    values[0] += 2 * rng.standard_normal((HEADS, 1, WIDTH))
    return values.astype(np.float16)


def feed(cache, parts: list[np.ndarray]) -> None:
    """Append one piece [2, HEADS, n, WIDTH] per row."""
    both = np.stack(parts, axis=1)
    cache.update_and_fetch(mx.array(both[0]), mx.array(both[1]))


def decoded(cache: TurboQuantKVCache) -> list[np.ndarray]:
    if cache.empty() or not cache.size():
        return []
    return [np.array(x) for x in cache.keys_and_values()]


class Batch(RuleBasedStateMachine):
    """``rows`` holds, for each row, the seed of its tokens and a cache of them alone."""

    @initialize(spec=st.sampled_from(SPECS), lengths=st.lists(st.integers(0, 60), min_size=1,
                                                               max_size=3))  # fmt: skip
    def begin(self, spec, lengths):
        self.spec, self.seeds = spec, 0
        self.rows: list[tuple[int, TurboQuantKVCache]] = []
        self.batch = self.merged(lengths)

    def empty(self):
        return TurboQuantKVCache(spec=self.spec)

    def contents(self, single) -> list[np.ndarray]:
        return decoded(single)

    def merged(self, lengths):
        new = []
        for n in lengths:
            self.seeds += 1
            single = self.empty()
            if n:
                feed(single, [sequence(self.seeds)[:, :, :n]])
            new.append((self.seeds, single))
        self.rows += new
        return self.empty().merge([copy.deepcopy(single) for _, single in new])

    def next_tokens(self, i: int, n: int) -> np.ndarray:
        seed, single = self.rows[i]
        return sequence(seed)[:, :, single.offset : single.offset + n]

    @precondition(lambda self: self.rows)
    @rule(n=st.integers(1, 12))
    def decode(self, n):
        if max(single.offset for _, single in self.rows) + n > LONGEST:
            return
        parts = [self.next_tokens(i, n) for i in range(len(self.rows))]
        feed(self.batch, parts)
        for (_, single), part in zip(self.rows, parts, strict=True):
            feed(single, [part])

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def prompt(self, data):
        lengths = [data.draw(st.integers(1, 50)) for _ in self.rows]
        most = max(lengths)
        if max(single.offset for _, single in self.rows) + most > LONGEST:
            return
        if min(lengths) < most:
            self.batch.prepare(lengths=lengths, right_padding=[most - n for n in lengths])
        parts = []
        for i, n in enumerate(lengths):
            part = self.next_tokens(i, n)
            parts.append(np.pad(part, [(0, 0), (0, 0), (0, most - n), (0, 0)], constant_values=7))
            feed(self.rows[i][1], [part])
        step = data.draw(st.integers(8, 50))
        for start in range(0, most, step):
            feed(self.batch, [p[:, :, start : start + step] for p in parts])
        self.batch.finalize()

    @precondition(lambda self: self.rows)
    @rule(n=st.integers(1, 5))
    def trim(self, n):
        # a row cut below its mean key keeps it; that is tested by itself
        floor = max(self.spec.warm_tokens, 1)
        if any(floor > single.offset - n for _, single in self.rows):
            return
        if not self.batch.is_trimmable():
            return
        self.batch.trim(n)
        for _, single in self.rows:
            single.trim(n)

    @precondition(lambda self: len(self.rows) > 1)
    @rule(data=st.data())
    def leave(self, data):
        order = data.draw(st.permutations(range(len(self.rows))))
        keep = order[: data.draw(st.integers(1, len(order)))]
        self.batch.filter(list(keep))
        self.rows = [self.rows[i] for i in keep]

    @precondition(lambda self: len(self.rows) < 5)
    @rule(lengths=st.lists(st.integers(0, 60), min_size=1, max_size=2))
    def join(self, lengths):
        self.batch.extend(self.merged(lengths))

    @rule()
    def copied(self):
        self.batch = copy.deepcopy(self.batch)

    def teardown(self):
        if not hasattr(self, "rows"):
            return
        assert self.batch.offset.tolist() == [single.offset for _, single in self.rows]
        for i, (_, single) in enumerate(self.rows):
            out = self.contents(self.batch.extract(i))
            expected = self.contents(single)
            assert len(out) == len(expected)
            assert all(np.array_equal(a, b) for a, b in zip(out, expected, strict=True))


class Windows(Batch):
    """The same of sliding windows; compared is what a next token sees."""

    def empty(self):
        return TurboQuantRotatingKVCache(WINDOW, KEEP, spec=self.spec)

    def contents(self, single) -> list[np.ndarray]:
        sides = [x[:, :, -single.store.live :] for x in decoded(single)]
        rest = WINDOW - 1 - KEEP
        return [np.concatenate([x[:, :, :KEEP], x[:, :, KEEP:][:, :, -rest:]], 2) for x in sides]


Batch.TestCase.settings = Windows.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=12,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
TestBatch = Batch.TestCase
TestWindows = Windows.TestCase
