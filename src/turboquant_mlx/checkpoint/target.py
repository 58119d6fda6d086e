"""Where a model folder is going to be: checks, the hidden sibling, the final rename.

The sibling ``.<name>.partial-<pid>`` becomes the target by one rename. With ``overwrite`` the old
folder is first renamed to ``.<name>.old-<pid>``, and back again if the second rename fails; it is
deleted when the new folder is in place. What processes that were killed left behind is put right
by the next one that writes to the same target.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import OutputError
from .source import CONFIG_FILE

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)

# Folders being written by this process: a sibling with our own pid may also be left over from an
# earlier process that had the same one.
_active: set[Path] = set()


def check_space(folder: str | Path, required_bytes: int) -> None:
    """Make sure that a file system has room.

    Args:
        folder: an existing folder on it.
        required_bytes: what is going to be written.

    Raises:
        OutputError: it has not.
    """
    with os_errors(f"{folder} cannot be used"):
        free = shutil.disk_usage(folder).free
    if required_bytes > free:
        raise OutputError(
            f"not enough space in {folder}: {_gigabytes(required_bytes)} needed, "
            f"{_gigabytes(free)} free"
        )


def check_target(target: str | Path, *, overwrite: bool = False) -> None:
    """Make sure that a folder can be made; nothing is changed.

    Raises:
        OutputError: it exists (with ``overwrite``: and is not a model folder), its parent does not
            exist or cannot be written, or MLX could not open what is in it.
    """
    target = Path(target)
    final = Path(os.path.realpath(target))
    try:
        str(final).encode("utf-8")
    except UnicodeEncodeError:
        raise OutputError(
            f"{target} cannot be made: the name is not valid UTF-8, and MLX could not open the "
            "model there"
        ) from None
    with os_errors(f"{target} cannot be made"):
        if final.is_symlink():  # all others were followed
            raise OutputError(f"{target} cannot be made, it is a link in a circle")
        if final.exists():
            if not overwrite:
                raise OutputError(
                    f"{target} exists already",
                    hint="choose another folder, or add --overwrite to replace this one",
                )
            if not final.is_dir():
                raise OutputError(f"{target} is a file and is not overwritten")
            if not (final / CONFIG_FILE).is_file() and any(final.iterdir()):
                raise OutputError(
                    f"{target} is not a model folder (it has no {CONFIG_FILE}) and is not "
                    "overwritten"
                )
            for inner in final.glob(f"*/**/{CONFIG_FILE}"):
                raise OutputError(
                    f"{target} is not overwritten, another model is in it: {inner.parent}",
                    hint="move that one away, or choose another folder",
                )
        if not final.parent.is_dir():
            raise OutputError(f"{target} cannot be made, there is no folder {final.parent}")
        if not os.access(final.parent, os.W_OK | os.X_OK):
            raise OutputError(f"{target} cannot be made, {final.parent} is not writable")


def make_partial(target: Path, *, overwrite: bool = False) -> Path:
    """Make the hidden sibling that becomes ``target``, and clean up after dead processes.

    Raises:
        OutputError: see ``check_target``.
    """
    check_target(target, overwrite=overwrite)
    final = Path(os.path.realpath(target))
    with os_errors(f"{target} cannot be made"):
        if _remove_stale(final):
            check_target(target, overwrite=overwrite)
        partial = final.parent / f".{final.name}.partial-{os.getpid()}"
        partial.mkdir()
    _active.add(partial)
    return partial


def remove_partial(partial: Path) -> None:
    """Remove a sibling that will not be finished."""
    shutil.rmtree(partial, ignore_errors=True)
    _active.discard(partial)


def move_into_place(partial: Path, target: Path, *, overwrite: bool) -> None:
    """Let a finished sibling appear as ``target``.

    Raises:
        OutputError: the target came into being meanwhile, or cannot be replaced. It is unharmed.
    """
    check_target(target, overwrite=overwrite)
    final = Path(os.path.realpath(target))
    with os_errors(f"{target} cannot be written"):
        sync_folder(partial)
        if not final.exists():
            os.rename(partial, final)
            sync_folder(final.parent)
        else:
            aside = final.parent / f".{final.name}.old-{os.getpid()}"
            os.rename(final, aside)
            try:
                os.rename(partial, final)
            except BaseException:
                os.rename(aside, final)
                raise
            sync_folder(final.parent)
            shutil.rmtree(aside, ignore_errors=True)
    _active.discard(partial)


def _remove_stale(final: Path) -> bool:
    """Clean up after processes that died while they wrote to the same target.

    Returns:
        whether a folder came back that was on its way to be replaced.
    """
    pattern = re.compile(rf"\.{re.escape(final.name)}\.(partial|old)-(\d+)")
    restored = False
    for path in sorted(final.parent.iterdir()):
        match = pattern.fullmatch(path.name)
        if match is None or path in _active or _is_alive(int(match[2])):
            continue
        if match[1] == "old" and not final.exists():
            os.rename(path, final)  # the process died between the two renames
            restored = True
        else:
            shutil.rmtree(path, ignore_errors=True)
    return restored


def _is_alive(pid: int) -> bool:
    if pid == os.getpid():
        return False  # not ours, or it would be in _active
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True


def sync_folder(path: Path) -> None:
    """Force the names in a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        pass  # some network file systems cannot do this for folders
    finally:
        os.close(descriptor)


@contextmanager
def os_errors(what: str, filename: str | None = None) -> Iterator[None]:
    """Turn an OSError of the block into an ``OutputError`` beginning with ``what``."""
    try:
        yield
    except OSError as error:
        raise output_error(what, filename, error) from error


def output_error(what: str, filename: str | None, error: OSError) -> OutputError:
    """What a user is told about an OSError while writing."""
    if error.errno in NO_SPACE:
        return OutputError(
            f"no space left on the disk: {what}",
            hint="free some space or choose another disk; nothing was left behind",
        )
    place = f" ({filename})" if filename else ""
    return OutputError(f"{what}{place}: {error.strerror or error}")


def _gigabytes(n: int) -> str:
    return f"{n / 1e9:.2f} GB" if n >= 1e7 else f"{n / 1e6:.2f} MB"
