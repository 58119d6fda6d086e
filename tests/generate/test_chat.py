"""From the user's words to token ids."""

import io
from types import SimpleNamespace

import pytest

from turboquant_mlx.errors import CheckpointError, OptionError
from turboquant_mlx.generate.chat import encode_prompt, read_prompt

QUESTION = "why does ice float?"
UNAWARE = "{% for m in messages %}<|start|>{{ m['content'] }}<|end|>{% endfor %}"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_argument_wins_over_standard_input():
    assert read_prompt(QUESTION, io.StringIO("something else")) == QUESTION


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_standard_input_is_read_without_its_last_line_end(end):
    assert read_prompt(None, io.StringIO(f"two\nlines{end}")) == "two\nlines"


def test_indentation_and_inner_blank_lines_of_a_prompt_are_kept():
    assert read_prompt("  a\n\n", None) == "  a\n\n"
    assert read_prompt(None, io.StringIO("  a\n\n")) == "  a\n"


@pytest.mark.parametrize("stdin", [Terminal(), None])
def test_nobody_waits_for_a_prompt_typed_into_a_terminal(stdin):
    with pytest.raises(OptionError, match="no prompt given") as error:
        read_prompt(None, stdin)
    assert "--prompt" in error.value.hint
    assert "|" in error.value.hint


@pytest.mark.parametrize("text", ["", " ", "\n \t"])
def test_an_empty_prompt_is_refused(text):
    with pytest.raises(OptionError, match="--prompt is empty"):
        read_prompt(text, None)
    with pytest.raises(OptionError, match="standard input is empty"):
        read_prompt(None, io.StringIO(text))


def test_bytes_that_are_no_text_are_refused():
    with pytest.raises(OptionError, match="--prompt is not valid UTF-8"):
        read_prompt("caf\udce9", None)
    with pytest.raises(OptionError, match="standard input is not text"):
        read_prompt(None, io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8"))


def test_the_chat_template_is_applied(tokenizer):
    encoded = encode_prompt(tokenizer, QUESTION)
    text = tokenizer.decode(encoded.tokens)
    assert text == f"<|start|>user\n{QUESTION}<|end|>\n<|start|>assistant\n"
    assert encoded.notices == []


def test_no_think_reaches_the_template(tokenizer):
    encoded = encode_prompt(tokenizer, QUESTION, no_think=True)
    assert tokenizer.decode(encoded.tokens).endswith("assistant\n<think>\n\n</think>\n\n")
    assert encoded.notices == []


def test_no_think_on_a_template_that_does_not_know_it_is_noted(tokenizer):
    tokenizer.chat_template = UNAWARE
    encoded = encode_prompt(tokenizer, QUESTION, no_think=True)
    assert encoded.tokens == encode_prompt(tokenizer, QUESTION).tokens
    assert encoded.notices == [
        "--no-think has no effect: the chat template does not know enable_thinking"
    ]


def test_without_a_template_the_prompt_stands_as_it_is(tokenizer):
    tokenizer.has_chat_template = False
    encoded = encode_prompt(tokenizer, QUESTION)
    assert tokenizer.decode(encoded.tokens) == QUESTION
    assert len(encoded.notices) == 1
    assert "no chat template" in encoded.notices[0]


def test_no_think_without_a_template_is_noted(tokenizer):
    tokenizer.has_chat_template = False
    notices = encode_prompt(tokenizer, QUESTION, no_think=True).notices
    assert "--no-think has no effect without a chat template" in notices


@pytest.mark.parametrize(("prompt", "added"), [("<s>hello", False), ("hello", True)])
def test_the_start_token_is_never_doubled(prompt, added):
    asked = []

    def encode(text, add_special_tokens):
        asked.append(add_special_tokens)
        return [1]

    encode_prompt(SimpleNamespace(has_chat_template=False, bos_token="<s>", encode=encode), prompt)
    assert asked == [added]


def test_a_failing_template_is_the_models_fault_and_one_line(tokenizer):
    tokenizer.chat_template = "{{ raise_exception('only system messages, please') }}"
    with pytest.raises(CheckpointError, match="chat template fails: only system messages"):
        encode_prompt(tokenizer, QUESTION)


def test_a_prompt_that_leaves_no_tokens_is_refused(tokenizer):
    tokenizer.chat_template = "{{ '' }}"
    with pytest.raises(OptionError, match="no token"):
        encode_prompt(tokenizer, QUESTION)
