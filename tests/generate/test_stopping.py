"""Which tokens end a generation."""

import pytest

from tiny import END_ID, PAD_ID, VOCAB_SIZE
from turboquant_mlx.errors import CheckpointError, OptionError
from turboquant_mlx.generate.stopping import end_token_ids, stop_token_ids


def stops(tokenizer, *texts):
    return stop_token_ids(tokenizer, texts, VOCAB_SIZE)


def test_end_tokens_of_all_sources_count(tokenizer):
    assert tokenizer.eos_token_ids == {END_ID}
    ids = end_token_ids(tokenizer, {"eos_token_id": 40}, {"eos_token_id": [PAD_ID, 41]})
    assert ids == {END_ID, 40, PAD_ID, 41}


@pytest.mark.parametrize("config", [{}, {"eos_token_id": None}, {"eos_token_id": []}])
def test_a_config_need_not_name_any(tokenizer, config):
    assert end_token_ids(tokenizer, config) == {END_ID}


@pytest.mark.parametrize("value", ["2", 2.0, True, [2, None], {"id": 2}])
def test_an_end_token_that_is_no_id_is_named(tokenizer, value):
    with pytest.raises(CheckpointError, match="eos_token_id"):
        end_token_ids(tokenizer, {"eos_token_id": value})


def test_a_stop_can_be_a_special_token_an_id_or_a_piece_of_text(tokenizer):
    letter = tokenizer.encode("q")[0]
    assert stops(tokenizer, "</think>") == {4}
    assert stops(tokenizer, "24") == {24}
    assert stops(tokenizer, "q") == {letter}
    assert stops(tokenizer, "\n") == {tokenizer.encode("\n")[0]}
    assert stops(tokenizer, "</think>", "24") == {4, 24}
    assert stops(tokenizer) == set()


def test_a_stop_can_be_a_raw_piece_of_the_vocabulary(tokenizer):
    # Byte-level vocabularies write a space as this letter.
    assert stops(tokenizer, "Ġ") == set(tokenizer.encode(" "))


def test_a_stop_of_several_tokens_is_refused_with_their_number(tokenizer):
    count = len(tokenizer.encode("nosuchtoken"))
    with pytest.raises(OptionError, match=f"--stop 'nosuchtoken' is {count} tokens") as error:
        stops(tokenizer, "nosuchtoken")
    assert "must be a single token" in error.value.message


def test_an_empty_stop_is_refused(tokenizer):
    with pytest.raises(OptionError, match="--stop '' is no token"):
        stops(tokenizer, "")


def test_an_id_beyond_the_vocabulary_is_refused(tokenizer):
    assert stops(tokenizer, str(VOCAB_SIZE - 1)) == {VOCAB_SIZE - 1}
    with pytest.raises(OptionError, match=f"--stop {VOCAB_SIZE} .* up to {VOCAB_SIZE - 1}"):
        stops(tokenizer, str(VOCAB_SIZE))


def test_text_of_a_token_beyond_the_vocabulary_is_refused(tokenizer):
    assert stop_token_ids(tokenizer, ["</think>"], 5) == {4}
    with pytest.raises(OptionError, match=r"--stop '</think>' is the token 4, .* up to 3"):
        stop_token_ids(tokenizer, ["</think>"], 4)
    letter = tokenizer.encode("\n")[0]
    with pytest.raises(OptionError, match=rf"--stop '\\n' is the token {letter}, "):
        stop_token_ids(tokenizer, ["\n"], letter)


def test_text_that_the_tokenizer_does_not_know_is_refused():
    class Unknowing:
        unk_token_id = 3

        def get_vocab(self):
            return {"<unk>": 3}

        def encode(self, text, add_special_tokens):
            return [3]

    with pytest.raises(OptionError, match="--stop '☃' is no token"):
        stops(Unknowing(), "☃")
