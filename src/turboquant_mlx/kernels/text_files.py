"""Texts of CUDA kernels in files, so that what MLX is given stays short.

MLX (0.32, CUDA) makes a hash of a kernel's whole text at each launch, to find the compiled form:
5.6 microseconds for 28 kB on the host of an H200, where a launch takes 2.6 without. A text that
includes another by its name is short, and the name, which holds a hash made once, tells texts apart
as well.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import tempfile
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path


@cache
def _folder() -> Path | None:
    """A folder of this process, which goes when the process ends; None where none can be made."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="turboquant-kernels-"))
    except OSError:
        return None
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # and not a fork of it
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


def shortened(header: str, source: str, names: Sequence[str]) -> tuple[str, str]:
    """``header`` and ``source`` of a kernel as two lines that include them from files.

    Args:
        header: what stands before the kernel's function.
        source: its body.
        names: of its inputs. MLX passes the shape, strides or ndim of those for which the body's
            text has a word like ``x_shape``, so the short body names these in a comment.

    Returns:
        the two texts; as they were where no file can be written.
    """
    folder = _folder()
    if folder is None or any(c in str(folder) for c in '"\n'):
        return header, source
    asked = [f"{n}_{what}" for n in names for what in ("shape", "strides", "ndim")]
    found = " ".join(word for word in asked if word in source)
    try:
        return (
            f'#include "{_written(folder, header)}"\n',
            f'// {found}\n#include "{_written(folder, source)}"\n',
        )
    except OSError:
        return header, source


def _written(folder: Path, text: str) -> str:
    path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.cuh"
    if not path.exists():
        scratch = path.with_suffix(f".{threading.get_ident()}")
        scratch.write_text(text)
        scratch.replace(path)  # another thread may be about to compile it
    return path.as_posix()
