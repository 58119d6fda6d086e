"""Fixtures of the tests that run small models of many types."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest


@pytest.fixture(scope="module")
def experts_in_bfloat16() -> Iterator[None]:
    """MLX's CPU build multiplies gathered experts in float32 only; caches do not depend on it."""
    original = mx.gather_mm

    def gather_mm(a: mx.array, b: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        wide = original(a.astype(mx.float32), b.astype(mx.float32), *args, **kwargs)
        return wide.astype(a.dtype)

    mx.gather_mm = gather_mm
    yield
    mx.gather_mm = original
