"""Packed keys and values of several sequences, appended to, cut, rolled and joined.

Tokens stand in columns shared by all rows, see ``layout``. A row's first tokens are held apart in
16 bits, in the row's own positions (``raw``): all of them until the row has ``spec.warm_tokens``,
then only the first ``spec.min_tokens``. At that moment, and never again, a part of the mean of the
32 keys behind the first ones becomes the row's ``shift`` and everything that may be packed is
packed. A row's stored bits therefore depend on its own tokens only, not on how many came at once or
on its neighbours.

Capacity grows by a sixteenth at a time, so a token is copied sixteen times in the long run, not at
every step.

A sliding window (``rotating``) forgets tokens at the front: ``drop`` hides their columns, which
costs nothing, and ``cut`` gives the columns back now and then. The first ``keep`` tokens are never
forgotten; they are in 16 bits, and stand in the columns right before the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from ..kernels.kv_sides import KVRows
from .codec import Parts, SideCodec, encode_sides, fold
from .decoded import decoded
from .layout import Layout
from .spec import MEAN_TOKENS

MEAN_SHARE = 0.7
"""Part of the mean key that is taken off. Rotary positions turn the mean as a text goes on: close
by 0.7 of it removes as much as all of it, and far away it does less harm."""

STEP = 16
"""Columns by which capacity grows at least."""


def grown(columns: int) -> int:
    """Capacity that is made for so many columns."""
    return columns + max(STEP, columns // 16) if columns else 0


@dataclass
class PackedStore(Layout):
    """Storage of one attention layer.

    Attributes:
        shift: [B, Hkv, 1, D] in the model's dtype, zero for rows that are not frozen; None until
            there is something to store or where keys are not rotated.
        keys, values: arrays [B, Hkv, capacity, n] of the codecs.
        raw_keys, raw_values: [B, Hkv, n, D], rows' first tokens in the model's dtype.
        widths: D of keys and of values.
        dtype_name: of the keys and values that came in.
        version: another one after every change.
        irregular: another one after every change but the append of columns that are all packed.
    """

    shift: mx.array | None = None
    keys: Parts = ()
    values: Parts = ()
    raw_keys: mx.array | None = None
    raw_values: mx.array | None = None
    widths: tuple[int, int] = (0, 0)
    dtype_name: str = ""
    version: int = 0
    irregular: int = 0

    # -- facts --------------------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        return self.raw_keys is None

    @property
    def dtype(self) -> mx.Dtype:
        """Dtype of the keys and values that came in, and of those that go out."""
        return getattr(mx, self.dtype_name)

    @property
    def key_codec(self) -> SideCodec:
        return self.codecs()[0]

    @property
    def value_codec(self) -> SideCodec:
        return self.codecs()[1]

    def codecs(self) -> tuple[SideCodec, SideCodec]:
        """Of keys and values; made once, for they are asked for several times a token."""
        held = self.held("codecs")
        if held is None or held[0] != (self.spec, self.widths):
            made = [
                SideCodec.of(self.spec, side, width)
                for side, width in zip(("key", "value"), self.widths, strict=True)
            ]
            held = ((self.spec, self.widths), (made[0], made[1]))
            self.hold("codecs", held)
        return held[1]

    def held(self, name: str) -> Any:
        """What ``hold`` was given, or None; a copy of the store holds nothing."""
        return self.__dict__.get("_held_" + name)

    def hold(self, name: str, made: Any) -> None:
        """Keep something that is made of the store and takes too long to make for each token."""
        self.__dict__["_held_" + name] = made

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if not k.startswith("_held_")}

    def token_rows(self) -> KVRows:
        """Where the tokens of each row are, for kernels."""
        if self.limits is not None:
            return KVRows(self.columns, tuple(self.padding), tuple(self.raw_lengths()))
        held = self.held("rows")
        if held is None or held[0] != self.irregular:
            held = self.irregular, tuple(self.padding), tuple(self.raw_lengths())
            self.hold("rows", held)
        return KVRows(self.columns, held[1], held[2])

    def _changed(self) -> None:
        self.version += 1
        self.irregular += 1

    def arrays(self) -> list[mx.array]:
        """Everything that takes memory."""
        held = [*self.keys, *self.values, self.shift, self.raw_keys, self.raw_values]
        return [a for a in held if a is not None]

    @property
    def anchor(self) -> mx.array | None:
        """An array that the next append starts from; it may be replaced by one that depends on
        something else and is equal to it."""
        return self.keys[0] if any(self.frozen) else self.raw_keys

    @anchor.setter
    def anchor(self, tied: mx.array) -> None:
        held = self.anchor
        if held is None or (tied.shape, tied.dtype) != (held.shape, held.dtype):
            raise ValueError("the keys of a packed cache cannot be replaced")
        if any(self.frozen):
            self.keys = (tied, *self.keys[1:])
        else:
            self.raw_keys = tied

    @property
    def nbytes(self) -> int:
        """Bytes that are held, spare capacity included."""
        return sum(a.nbytes for a in self.arrays())

    @property
    def spare_nbytes(self) -> int:
        """Bytes of columns and raw positions that hold no token yet, or none any more."""
        spare = 0
        for part in (*self.keys, *self.values):
            unused = part.shape[2] - self.live
            spare += part.nbytes * unused // max(part.shape[2], 1)
        used = max(self.raw_lengths(), default=0)
        for raw in (self.raw_keys, self.raw_values):
            if raw is not None and raw.shape[2]:
                spare += raw.nbytes * (raw.shape[2] - min(used, raw.shape[2])) // raw.shape[2]
        return spare

    def plain_nbytes(self) -> int:
        """Bytes that 16-bit keys and values of the columns in use take (32-bit ones if those
        came in)."""
        if self.raw_keys is None:
            return 0
        heads = self.raw_keys.shape[1]
        return self.batch * heads * self.live * sum(self.widths) * self.dtype.size

    # -- appending ----------------------------------------------------------------------------

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Take in the next columns.

        Args:
            keys: [B, Hkv, n, D]. values: [B, Hkv, n, Dv].
        """
        if self.is_empty:
            self._begin(keys, values)
        if keys.dtype != self.dtype or values.dtype != self.dtype:
            keys, values = keys.astype(self.dtype), values.astype(self.dtype)
        n, before_columns = keys.shape[2], self.columns
        if self._only_packs(n):
            self.columns += n
            self.version += 1
            self._write(before_columns, keys, values)
            return
        before = self.lengths()
        self.columns += n
        self._changed()
        after = self.lengths()
        self._reserve(self.columns)
        self._hold(keys, values, before_columns, before, after)
        newly = [r for r in range(self.batch) if self.is_due(r, after[r])]
        for r in newly:
            self._freeze(r)
        if any(self.frozen):
            self._write(before_columns, keys, values)
        for r in newly:
            self._pack_held(r, min(before[r], after[r]))
        if all(self.frozen):
            self._shrink_raw(max(self.first_tokens(r) for r in range(self.batch)))

    def _only_packs(self, n: int) -> bool:
        """Whether the next n columns fit and no row keeps any of them in 16 bits: nearly always
        while tokens are generated, when every microsecond counts."""
        if not all(self.frozen) or self.limits is not None:
            return False
        shortest = self.columns - max(self.padding)
        fits = self.columns + n <= self.keys[0].shape[2]
        return fits and shortest >= self.spec.min_tokens + self.keep

    def _begin(self, keys: mx.array, values: mx.array) -> None:
        if keys.shape[0] != self.batch:
            raise ValueError(f"{keys.shape[0]} rows do not fit a cache of {self.batch}")
        self.widths = (keys.shape[-1], values.shape[-1])
        self.dtype_name = str(keys.dtype).rpartition(".")[2]
        batch, heads = keys.shape[:2]
        self.keys = self.key_codec.empty(batch, heads, 0, self.dtype)
        self.values = self.value_codec.empty(batch, heads, 0, self.dtype)
        if self.key_codec.rotated:
            self.shift = mx.zeros((batch, heads, 1, keys.shape[-1]), dtype=self.dtype)
        self.raw_keys = mx.zeros((batch, heads, 0, keys.shape[-1]), dtype=self.dtype)
        self.raw_values = mx.zeros((batch, heads, 0, values.shape[-1]), dtype=self.dtype)

    def _reserve(self, columns: int) -> None:
        """Room in the packed arrays; rows that are all in 16 bits need none yet."""
        capacity = self.keys[0].shape[2]
        if columns <= capacity or not (
            any(self.frozen) or max(self.lengths()) >= self.spec.warm_tokens
        ):
            return
        self.keys = _padded(self.keys, grown(columns))
        self.values = _padded(self.values, grown(columns))

    def _hold(
        self,
        keys: mx.array,
        values: mx.array,
        first_column: int,
        before: list[int],
        after: list[int],
    ) -> None:
        """Keep in 16 bits what belongs there, and what is not packed yet."""
        assert self.raw_keys is not None and self.raw_values is not None
        ends = [min(n, self.first_tokens(r)) if self.frozen[r] else n for r, n in enumerate(after)]
        if all(end <= start for end, start in zip(ends, before, strict=True)):
            return
        need = max(ends)
        if need > self.raw_keys.shape[2]:
            size = max(min(grown(need), max(self.spec.warm_tokens, need)), need)
            self.raw_keys, self.raw_values = _padded((self.raw_keys, self.raw_values), size)
        for r, (start, end) in enumerate(zip(before, ends, strict=True)):
            if end > start:
                column = self.padding[r] + start - first_column
                part = slice(column, column + end - start)
                self.raw_keys[r, :, start:end] = keys[r, :, part]
                self.raw_values[r, :, start:end] = values[r, :, part]

    def _freeze(self, r: int) -> None:
        """Give row r its mean key."""
        assert self.raw_keys is not None
        if self.shift is not None:
            first = self.first_tokens(r)
            some = self.raw_keys[r, :, first : first + MEAN_TOKENS].astype(mx.float32)
            mean = fold(some, 1) * (MEAN_SHARE / MEAN_TOKENS)
            self.shift[r] = mean.astype(self.dtype)
        self.frozen[r] = True

    def _write(
        self, column: int, keys: mx.array, values: mx.array, rows: slice = slice(None)
    ) -> None:
        whole = rows == slice(None)
        shift = self.shift if self.shift is None or whole else self.shift[rows]
        end = column + keys.shape[2]
        coded = encode_sides([(self.key_codec, keys, shift), (self.value_codec, values, None)])
        for parts, new_parts in zip((self.keys, self.values), coded, strict=True):
            for held, new in zip(parts, new_parts, strict=True):
                held[rows, :, column:end] = new

    def _pack_held(self, r: int, until: int) -> None:
        """Pack row r's tokens that were held in 16 bits and came before the latest columns."""
        assert self.raw_keys is not None and self.raw_values is not None
        start = self.first_tokens(r)
        if until > start:
            part = (slice(r, r + 1), slice(None), slice(start, until))
            column = self.padding[r] + start
            self._write(column, self.raw_keys[part], self.raw_values[part], slice(r, r + 1))

    def _shrink_raw(self, size: int) -> None:
        assert self.raw_keys is not None and self.raw_values is not None
        if self.raw_keys.shape[2] > size:
            self.raw_keys = mx.contiguous(self.raw_keys[:, :, :size])
            self.raw_values = mx.contiguous(self.raw_values[:, :, :size])

    def decoded(self, columns: int) -> tuple[mx.array, mx.array]:
        """Keys and values [B, Hkv, columns, D] of the first columns in the model's dtype, lazy.

        Columns before a row's first token hold anything finite.
        """
        return decoded(self, columns)

    # -- rearranging --------------------------------------------------------------------------

    def trim(self, n: int) -> int:
        """Forget the last n columns; returns how many were there to forget.

        A row that was frozen stays so: cut to less than the tokens of its mean key and continued
        in another way, it keeps a shift that is as valid but not the one it would get anew.
        """
        n = min(n, self.columns)
        self.columns -= n
        self._changed()
        return n

    def drop(self, column: int) -> None:
        """Forget what came before a column, but for each row's first ``keep`` tokens.

        Raises:
            ValueError: it is behind the columns in use.
        """
        if column > self.columns:
            raise ValueError(f"column {column} of {self.columns} cannot come first")
        gone = [max(0, column - p) for p in self.padding]
        if not any(gone):
            return
        for r, (n, held) in enumerate(zip(gone, self.raw_lengths(), strict=True)):
            left = held - self.keep - n  # tokens in 16 bits that stay, behind those kept
            if n and held > self.keep and self.raw_keys is not None:
                for raw in (self.raw_keys, self.raw_values):
                    assert raw is not None
                    if left > 0:
                        moved = mx.array(raw[r, :, held - left : held])
                        raw[r, :, self.keep : self.keep + left] = moved
            self.padding[r] += n
            self.dropped[r] += n
            if self.limits is not None:
                self.limits[r] -= n
        if all(self.frozen):
            self._shrink_raw(max(self.raw_lengths()))
        self._changed()

    def cut(self, columns: int) -> None:
        """Give back the columns that no row uses any more, and make room for so many in all."""
        first = self.columns - self.live
        if self.keys and self.keys[0].shape[2]:
            size = grown(columns)
            self.keys, self.values = (
                _padded((p[:, :, first : self.columns] for p in parts), size)
                for parts in (self.keys, self.values)
            )
        self.columns -= first
        self.padding = [p - first for p in self.padding]
        self._changed()

    def roll(self, right_padding: Sequence[int]) -> None:
        """Move each row right by its padding, from behind its tokens to before them."""
        shifts = mx.array(list(right_padding))[:, None]
        self.keys = tuple(_rolled(p, shifts) for p in self.keys)
        self.values = tuple(_rolled(p, shifts) for p in self.values)
        self.padding = [p + r for p, r in zip(self.padding, right_padding, strict=True)]
        self.limits = None
        self._changed()

    def rows(self, keep: Sequence[int]) -> PackedStore:
        """A store of some rows, without columns that none of them uses."""
        picked = mx.array(list(keep), dtype=mx.int32)

        def take(a: mx.array | None) -> mx.array | None:
            return None if a is None else a[picked]

        out = replace(
            self,
            padding=[self.padding[i] for i in keep],
            frozen=[self.frozen[i] for i in keep],
            dropped=[self.dropped[i] for i in keep],
            shift=take(self.shift),
            keys=tuple(p[picked] for p in self.keys),
            values=tuple(p[picked] for p in self.values),
            raw_keys=take(self.raw_keys),
            raw_values=take(self.raw_values),
            limits=None if self.limits is None else [self.limits[i] for i in keep],
        )
        out.version = self.version + 1
        out._compact()
        return out

    def _compact(self) -> None:
        cut = self.columns - self.live
        if cut > 0:
            self.keys = tuple(p[:, :, cut:] for p in self.keys)
            self.values = tuple(p[:, :, cut:] for p in self.values)
            self.columns -= cut
            self.padding = [p - cut for p in self.padding]
        if self.frozen and not any(self.frozen):
            self.keys = tuple(p[:, :, :0] for p in self.keys)
            self.values = tuple(p[:, :, :0] for p in self.values)
        if not self.is_empty:
            self._shrink_raw(max(self.raw_lengths(), default=0))

    def tight(self) -> PackedStore:
        """The same without spare columns, in memory of its own."""
        end = self.columns if any(self.frozen) else 0
        return replace(
            self,
            keys=tuple(mx.contiguous(p[:, :, :end]) for p in self.keys),
            values=tuple(mx.contiguous(p[:, :, :end]) for p in self.values),
            padding=list(self.padding),
            frozen=list(self.frozen),
            dropped=list(self.dropped),
        )


def _padded(parts: Iterable[mx.array], size: int) -> Parts:
    return tuple(
        mx.concatenate(
            [p, mx.zeros((*p.shape[:2], size - p.shape[2], p.shape[3]), p.dtype)], axis=2
        )
        for p in parts
    )


def _rolled(x: mx.array, shifts: mx.array) -> mx.array:
    if not x.shape[2]:
        return x
    index = (mx.arange(x.shape[2])[None] - shifts) % x.shape[2]
    return mx.take_along_axis(x, index[:, None, :, None], axis=2)
