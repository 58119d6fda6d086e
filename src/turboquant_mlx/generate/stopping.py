"""Which tokens end a generation: those that the model's files name, and those of ``--stop``.

Imports no MLX.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import CheckpointError, OptionError


def end_token_ids(tokenizer: Any, *configs: Mapping[str, Any]) -> set[int]:
    """All ids that end an answer: the tokenizer's own and ``eos_token_id`` of every config.

    The union, because the sources disagree in practice: config.json often names only the end of
    a text where generation_config.json also names the end of a turn.

    Args:
        tokenizer: mlx-lm's wrapper (its ``eos_token_ids`` is read).
        configs: contents of config.json and generation_config.json; a value may be missing, null,
            an id or a list of ids.

    Raises:
        CheckpointError: an ``eos_token_id`` that is none of these.
    """
    ids = set(tokenizer.eos_token_ids)
    for config in configs:
        value = config.get("eos_token_id")
        values = value if isinstance(value, list) else [] if value is None else [value]
        for one in values:
            if isinstance(one, bool) or not isinstance(one, int):
                raise CheckpointError(
                    f"eos_token_id is not a token id or a list of them: {value!r}"
                )
            ids.add(one)
    return ids


def stop_token_ids(tokenizer: Any, stops: Iterable[str], vocabulary: int) -> set[int]:
    """Ids of the tokens that ``--stop`` names.

    Digits alone are an id. Anything else is first looked up in the vocabulary as it is written
    (special tokens, raw pieces), then encoded as text.

    Args:
        stops: the arguments as given.
        vocabulary: number of ids that the model can produce.

    Raises:
        OptionError: not exactly one token, or an id that the model does not have.
    """
    return {_stop_token_id(tokenizer, text, vocabulary) for text in stops}


def _stop_token_id(tokenizer: Any, text: str, vocabulary: int) -> int:
    if text.isascii() and text.isdigit():
        token = int(text) if len(text) < 20 else vocabulary  # Python refuses very long ones
        if token >= vocabulary:
            raise OptionError(
                f"--stop {text} is not a token id of this model: they go up to {vocabulary - 1}"
            )
        return token
    known = tokenizer.get_vocab().get(text)
    if known is not None:
        return _within(int(known), text, vocabulary)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise OptionError("--stop is not valid UTF-8 text") from None
    tokens = list(tokenizer.encode(text, add_special_tokens=False))
    unknown = getattr(tokenizer, "unk_token_id", None)
    if len(tokens) != 1 or tokens[0] == unknown:
        count = "no token" if not tokens or tokens == [unknown] else f"{len(tokens)} tokens"
        raise OptionError(
            f"--stop {text!r} is {count} for this model, and a stop must be a single token",
            hint="special tokens such as '</s>' and numeric token ids work",
        )
    return _within(int(tokens[0]), text, vocabulary)


def _within(token: int, text: str, vocabulary: int) -> int:
    if token >= vocabulary:
        raise OptionError(
            f"--stop {text!r} is the token {token}, but this model's go up to {vocabulary - 1}"
        )
    return token
