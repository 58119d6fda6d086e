"""Exceptions whose text is shown to users.

A command prints ``error: <message>`` (and ``hint: <hint>`` where there is one) on stderr and
exits with ``exit_code``; nobody but a developer ever sees a traceback. Messages are one line,
name the file, tensor or option at fault and end without a full stop.
"""

from __future__ import annotations


class TurboQuantError(Exception):
    """Base of every error that this package raises on purpose.

    Args:
        message: one line, without a full stop.
        hint: one line that says what to do about it, or None.
    """

    exit_code = 2

    def __init__(self, message: str, hint: str | None = None):
        super().__init__(message)
        self.message = message
        self.hint = hint


class OptionError(TurboQuantError):
    """An option has a bad value, or does not apply to this model or command."""


class ModelNotFoundError(TurboQuantError):
    """There is no such folder, and no such model on the hub (or no way to reach it)."""


class UnsupportedModelError(TurboQuantError):
    """The folder is a model, but of a type or in a precision that cannot be handled."""


class CheckpointError(TurboQuantError):
    """A checkpoint is incomplete, damaged or contradicts itself."""


class QuantizationError(TurboQuantError):
    """A tensor cannot be quantized as asked (shape, width, non-finite values)."""


class OutputError(TurboQuantError):
    """The result cannot be written (target exists, no space, no permission)."""
