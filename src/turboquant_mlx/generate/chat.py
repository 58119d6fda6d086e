"""From what the user typed to the token ids that the model reads.

Works on any tokenizer with the interface of mlx-lm's ``TokenizerWrapper``; imports no MLX.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TextIO

from ..errors import CheckpointError, OptionError

HOW_TO_PROMPT = (
    'give one with --prompt "...", or pipe it in: echo "..." | turboquant-generate --model MODEL'
)


@dataclass(frozen=True)
class EncodedPrompt:
    """Token ids of a prompt, and what the user should know about how they came about."""

    tokens: list[int]
    notices: list[str] = field(default_factory=list)


def read_prompt(argument: str | None, stdin: TextIO | None) -> str:
    """The prompt: the argument if there is one, else all of standard input.

    One line end at the end of standard input is not part of the prompt, since ``echo`` and every
    editor put it there.

    Raises:
        OptionError: no prompt, an empty one, or one that is not text.
    """
    if argument is not None:
        where, prompt = "--prompt", argument
    else:
        if stdin is None or stdin.isatty():
            raise OptionError("no prompt given", hint=HOW_TO_PROMPT)
        where = "the prompt on standard input"
        try:
            prompt = stdin.read()
        except UnicodeDecodeError as error:
            raise OptionError(f"{where} is not text: {error}") from None
        prompt = prompt.removesuffix("\n").removesuffix("\r")
    try:
        # Bytes that are no text reach us as lone surrogates, which no tokenizer accepts.
        prompt.encode("utf-8")
    except UnicodeEncodeError:
        raise OptionError(f"{where} is not valid UTF-8 text") from None
    if not prompt.strip():
        raise OptionError(f"{where} is empty", hint=HOW_TO_PROMPT)
    return prompt


def encode_prompt(tokenizer: Any, prompt: str, *, no_think: bool = False) -> EncodedPrompt:
    """Token ids of ``prompt`` as the user's turn of the model's chat template.

    A tokenizer without a chat template gets the prompt as it stands, with its special start token
    if it has one. Both that, and a template on which ``no_think`` has no effect, are noted.

    Raises:
        CheckpointError: the model's template fails on a plain one-turn conversation.
        OptionError: the tokenizer makes no token of the prompt.
    """
    notices = []
    if not tokenizer.has_chat_template:
        notices.append("this model has no chat template, so it continues the prompt as it stands")
        if no_think:
            notices.append("--no-think has no effect without a chat template")
        # The rule of mlx-lm: a prompt that already spells the start token gets no second one.
        start = tokenizer.bos_token
        try:
            tokens = tokenizer.encode(
                prompt, add_special_tokens=start is None or not prompt.startswith(start)
            )
        except Exception as error:  # a tokenizer's files can be wrong in ways that show only here
            reason = str(error) or type(error).__name__
            raise CheckpointError(f"the model's tokenizer fails: {reason}") from error
    elif no_think:
        tokens = _apply_template(tokenizer, prompt, enable_thinking=False)
        if tokens == _apply_template(tokenizer, prompt, enable_thinking=True):
            notices.append(
                "--no-think has no effect: the chat template does not know enable_thinking"
            )
    else:
        tokens = _apply_template(tokenizer, prompt)
    if not tokens:
        raise OptionError("the tokenizer makes no token of this prompt")
    return EncodedPrompt(tokens, notices)


def _apply_template(tokenizer: Any, prompt: str, **switches: bool) -> list[int]:
    messages = [{"role": "user", "content": prompt}]
    try:
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, **switches))
    except Exception as error:
        # The template is a program that came with the model: it can fail in any way.
        reason = str(error) or type(error).__name__
        raise CheckpointError(f"the model's chat template fails: {reason}") from error
