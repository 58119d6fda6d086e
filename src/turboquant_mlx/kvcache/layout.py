"""Where the tokens of several sequences stand in a packed store.

Tokens stand in columns shared by all rows; row r's own token t is in column ``padding[r] + t``, so
rows of different lengths are padded on the left. A sliding window forgets tokens at the front:
their columns are hidden as if they were padding, and a row's own positions count from the first
token that is left. All of this is known to Python, so nothing waits for the device to learn it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .spec import KVSpec


@dataclass
class Layout:
    """Columns and rows, without their contents.

    Attributes:
        spec: how the store is packed.
        padding: columns before each row's first token.
        columns: columns in use.
        frozen: whether a row has its shift and is packed.
        limits: while a right-padded prompt is read, each row's own length at its end.
        keep: so many first tokens are never dropped.
        dropped: tokens of each row that were forgotten at the front.
    """

    spec: KVSpec
    padding: list[int]
    columns: int = 0
    frozen: list[bool] = field(default_factory=list)
    limits: list[int] | None = None
    keep: int = 0
    dropped: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.frozen:
            self.frozen = [False] * len(self.padding)
        if not self.dropped:
            self.dropped = [0] * len(self.padding)

    @property
    def batch(self) -> int:
        return len(self.padding)

    def offsets(self) -> list[int]:
        """Position of each row's next token; negative inside its padding."""
        return [n + self.columns - p for n, p in zip(self.dropped, self.padding, strict=True)]

    def beyond_limits(self) -> list[int]:
        """Columns behind each row's last token, while a right-padded prompt is read."""
        if self.limits is None:
            return [0] * self.batch
        own = [self.columns - p for p in self.padding]
        return [max(0, n - limit) for n, limit in zip(own, self.limits, strict=True)]

    def lengths(self) -> list[int]:
        """Tokens of each row."""
        own = [max(0, self.columns - p) for p in self.padding]
        if self.limits is not None:
            own = [min(a, b) for a, b in zip(own, self.limits, strict=True)]
        return own

    def first_tokens(self, r: int) -> int:
        """Tokens of row r that stay in 16 bits for good, of those that are not dropped yet."""
        return self.keep + max(0, self.spec.min_tokens - self.keep - self.dropped[r])

    def raw_lengths(self) -> list[int]:
        """So many first tokens of each row are held in 16 bits."""
        return [
            min(n, self.first_tokens(r)) if self.frozen[r] else n
            for r, n in enumerate(self.lengths())
        ]

    @property
    def live(self) -> int:
        """Columns behind those that no row uses."""
        return self.columns - min(min(self.padding, default=0), self.columns)

    def is_due(self, r: int, length: int) -> bool:
        """Whether row r, with so many tokens, gets its mean key and is packed."""
        behind = length - self.first_tokens(r)
        enough = length + self.dropped[r] >= self.spec.warm_tokens
        return not self.frozen[r] and enough and behind >= self.spec.mean_tokens
