"""What all commands share: the parser class, error printing, exit codes, notices.

Nothing here imports MLX, so that ``--help`` answers at once.
"""

from __future__ import annotations

import sys


def _end_quietly(kind, error, traceback) -> None:
    """``sys.excepthook`` of our commands: Ctrl-C while Python is still importing is no fault."""
    if issubclass(kind, KeyboardInterrupt) or isinstance(error.__cause__, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    sys.__excepthook__(kind, error, traceback)


EXIT_OK = 0
EXIT_FINDING = 1
EXIT_ERROR = 2
EXIT_INTERRUPTED = 130

# Only commands import this module, and its other imports and theirs take a while: this comes first.
# ruff: noqa: E402
if sys.excepthook is sys.__excepthook__:
    sys.excepthook = _end_quietly

import argparse
import contextlib
import io
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import NoReturn

from .errors import OptionError, TurboQuantError


class CommandParser(argparse.ArgumentParser):
    """ArgumentParser whose usage errors look like every other error of ours."""

    def __init__(self, *args, **kwargs):
        # An abbreviation would silently change meaning when a longer option is added.
        kwargs.setdefault("allow_abbrev", False)
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        print(f"error: {_one_line(message)}", file=sys.stderr)
        print(f"hint: {self.prog} --help lists every option", file=sys.stderr)
        raise SystemExit(EXIT_ERROR)


def notice(message: str) -> None:
    """Say something that the user should know, on stderr."""
    print(f"note: {_one_line(message)}", file=sys.stderr, flush=True)


def warn(message: str) -> None:
    """Say something that the user may have to act on, on stderr."""
    print(f"warning: {_one_line(message)}", file=sys.stderr, flush=True)


def print_error(error: TurboQuantError) -> None:
    """Print an error as one line, with its hint below."""
    print("error: " + _one_line(error.message), file=sys.stderr)
    if error.hint:
        print("hint: " + _one_line(error.hint), file=sys.stderr)


def _one_line(text: str) -> str:
    """Text that may come from a stranger's file, without what a terminal would obey."""
    line = " ".join(text.split())
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)


def run(command: Callable[[Sequence[str] | None], int | None], argv: Sequence[str] | None) -> int:
    """Run ``command(argv)`` and turn its exceptions into exit codes.

    Returns:
        the command's own code (None means 0), 2 after an error, 130 after Ctrl-C,
        141 when the reader of our output went away (as a shell reports SIGPIPE).
    """
    _open_closed_streams()
    with _signals_noted():
        return _run(command, argv)


def _run(command: Callable[[Sequence[str] | None], int | None], argv: Sequence[str] | None) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # paths need not be text
    try:
        _slow_progress_in_logs()
        try:
            code = command(argv) or EXIT_OK
        except Exception:
            raise_if_interrupted()  # what a library made of it
            raise
        raise_if_interrupted()
        sys.stdout.flush()
        return code
    except TurboQuantError as error:
        print_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Python would complain again when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        where = error.filename or "reading or writing failed"
        _silence_broken_stdout()
        with contextlib.suppress(OSError):
            print_error(TurboQuantError(f"{where}: {error.strerror or error}"))
        return EXIT_ERROR
    except (MemoryError, RuntimeError) as error:
        if str(error).startswith("filesystem error: temp_directory_path"):  # MLX's compiler
            hint = "set TMPDIR to a folder that exists"
            print_error(TurboQuantError("there is no folder for temporary files", hint))
            return EXIT_ERROR
        if not _is_out_of_memory(error):
            raise
        hint = "fewer bits or a shorter prompt need less"
        print_error(TurboQuantError("out of memory", hint))
        return EXIT_ERROR


def raise_if_interrupted() -> None:
    """End again if Ctrl-C was pressed, or an end was asked for, and somebody else kept that.

    Python raises the exception wherever it happens to be, which may be deep in a library, or below
    C code that drops exceptions. So long work asks here at every step. Does nothing where signals
    are not ours: outside of ``run``, or where the caller ignores them.

    Raises:
        KeyboardInterrupt: after Ctrl-C.
        SystemExit: after SIGTERM.
    """
    if _asked_to_end == signal.SIGINT:
        raise KeyboardInterrupt
    if _asked_to_end:
        raise SystemExit(128 + _asked_to_end)


_asked_to_end = 0
"""Number of the signal that did during a command, 0 for none."""

_commands = 0
"""How many are at work in the main thread, one within the other."""


def _note(number: int, frame: FrameType | None) -> None:
    global _asked_to_end
    if _commands:
        _asked_to_end = number
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


@contextlib.contextmanager
def _signals_noted() -> Iterator[None]:
    """Let ``raise_if_interrupted`` know of Ctrl-C, and let a request to end unwind the stack, so
    that what is half written is removed.

    Signals reach the main thread alone, and what comes after a command is not ended by its own.
    """
    global _asked_to_end, _commands
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # whoever starts us with Ctrl-C ignored, as nohup does, wants us to go on
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _note)
    signal.signal(signal.SIGTERM, _note)
    _commands += 1
    try:
        yield
    finally:
        _commands -= 1
        if not _commands:
            _asked_to_end = 0


def _slow_progress_in_logs() -> None:
    """Where stderr is no terminal, let a progress bar add to it every few seconds only.

    tqdm reads this variable when it is imported, which the commands do later; it then holds for
    the bars of the hub's client and of mlx-lm as well.

    Raises:
        OptionError: the variable has a value that tqdm does not take.
    """
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_MININTERVAL", "5")
    seconds = os.environ.get("TQDM_MININTERVAL", "5")
    try:
        float(seconds)
    except ValueError:
        raise OptionError(f"TQDM_MININTERVAL {seconds!r} is not a number of seconds") from None


def bars_are_off(shown: bool) -> bool:
    """What progress bars are told as ``disable``; by ``TQDM_DISABLE`` a user wants none.

    tqdm itself asks for the variable only where nothing is said about it.
    """
    return not shown or os.environ.get("TQDM_DISABLE", "").lower() not in ("", "0", "false")


def _open_closed_streams() -> None:
    """Give output that the caller closed (``>&-``) to nobody.

    Otherwise the next file to be opened takes its number, and libraries print into that file.
    """
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            while os.open(os.devnull, os.O_RDWR) < number:
                pass
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  # lives as long as we do


def _silence_broken_stdout() -> None:
    """Python flushes stdout at its exit, and would complain again."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _is_out_of_memory(error: Exception) -> bool:
    # MLX has no exception of its own for this, and each of its back-ends words it differently
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(
        words in text for words in ("unable to allocate", "insufficient memory", "out of memory")
    )
