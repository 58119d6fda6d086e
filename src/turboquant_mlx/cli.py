"""What all commands share: the parser class, error printing, exit codes, notices.

Nothing here imports MLX, so that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from .errors import TurboQuantError

EXIT_OK = 0
EXIT_FINDING = 1
EXIT_ERROR = 2
EXIT_INTERRUPTED = 130


class CommandParser(argparse.ArgumentParser):
    """ArgumentParser whose usage errors look like every other error of ours."""

    def __init__(self, *args, **kwargs):
        # An abbreviation would silently change meaning when a longer option is added.
        kwargs.setdefault("allow_abbrev", False)
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        print(f"error: {message}", file=sys.stderr)
        print(f"hint: {self.prog} --help lists every option", file=sys.stderr)
        raise SystemExit(EXIT_ERROR)


def notice(message: str) -> None:
    """Say something that the user should know, on stderr."""
    print(f"note: {message}", file=sys.stderr, flush=True)


def warn(message: str) -> None:
    """Say something that the user may have to act on, on stderr."""
    print(f"warning: {message}", file=sys.stderr, flush=True)


def print_error(error: TurboQuantError) -> None:
    """Print an error as one line, with its hint below."""
    print("error: " + " ".join(error.message.split()), file=sys.stderr)
    if error.hint:
        print("hint: " + " ".join(error.hint.split()), file=sys.stderr)


def run(command: Callable[[Sequence[str] | None], int | None], argv: Sequence[str] | None) -> int:
    """Run ``command(argv)`` and turn its exceptions into exit codes.

    Returns:
        the command's own code (None means 0), 2 after an error, 130 after Ctrl-C,
        141 when the reader of our output went away (as a shell reports SIGPIPE).
    """
    try:
        return command(argv) or EXIT_OK
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
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        hint = "fewer bits or a shorter prompt need less"
        print_error(TurboQuantError("out of memory", hint))
        return EXIT_ERROR


def _is_out_of_memory(error: Exception) -> bool:
    # MLX has no exception of its own for this, and each of its back-ends words it differently
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(
        words in text for words in ("unable to allocate", "insufficient memory", "out of memory")
    )
