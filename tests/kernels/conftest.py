"""Which of the kernels' tests run by default."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_cases import ON_GPU

HERE = Path(__file__).parent
EVERY = 16


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One in sixteen of the CUDA cases of a test stays; the others are heavy.

    Without a GPU both renderings of a kernel's one body are compiled and run on the CPU, most of
    them for no other test. All of the Metal cases stay, because nothing else runs that rendering;
    of CUDA the same file runs on a GPU, every case of it.
    """
    if ON_GPU:
        return
    seen: dict[str, int] = {}
    for item in items:
        call = getattr(item, "callspec", None)
        if call is None or HERE not in item.path.parents or "cuda" not in call.params.values():
            continue
        if item.get_closest_marker("heavy"):
            continue
        name = item.nodeid.partition("[")[0]
        seen[name] = seen.get(name, -1) + 1
        if seen[name] % EVERY:
            item.add_marker(pytest.mark.heavy)
