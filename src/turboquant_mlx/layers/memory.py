"""How much memory this machine can still give."""

from __future__ import annotations

import os
from pathlib import Path

MAC_FREE_SHARE = 0.5
"""Part of a Mac's memory taken as free: macOS gives no simple figure, and caches shrink."""


def available_memory_bytes() -> int:
    """Bytes that a process may still take without swapping, as well as the system tells."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        values = {name: rest.split()[0] for name, _, rest in (x.partition(":") for x in lines)}
        available = int(values["MemAvailable"]) * 1024
    except (OSError, KeyError, ValueError, IndexError):
        pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
        available = int(pages * page_bytes * MAC_FREE_SHARE)
    return min(available, _control_group_bytes(available))


def _control_group_bytes(default: int) -> int:
    """What a container's limit (cgroup version 2) leaves; ``default`` where there is none."""
    root = Path("/sys/fs/cgroup")
    try:
        limit = int((root / "memory.max").read_text())
        return max(0, limit - int((root / "memory.current").read_text()))
    except (OSError, ValueError):
        return default
