"""turboquant-generate as a whole, on a model that follows a script: every option has an effect."""

import contextlib
import io
import signal
import sys
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest

from tiny import END_ID, PAD_ID
from turboquant_mlx.errors import CheckpointError
from turboquant_mlx.generate import command, processors
from turboquant_mlx.kernels import awake
from turboquant_mlx.kernels.dispatch import force_backend

END = "<|end|>"
GREEDY = ("--temp", "0")
# Six candidates so close to each other that sampling soon takes each of them.
OPEN = [list("abcdef")]


def test_the_answer_goes_to_stdout_and_everything_else_to_stderr(answer):
    result = answer(["a", "b", "c", END], *GREEDY)
    assert result.code == 0
    assert result.out == "abc\n"
    assert result.err.splitlines()[:2] == ["sampling: greedy", result.err.splitlines()[1]]
    assert "generated: 4 tokens, " in result.err
    assert "(ended by the model)" in result.err
    assert "GB counted by MLX" in result.err
    assert "GB of the whole process" in result.err
    assert result.notes == []


def test_the_chat_template_surrounds_the_prompt(answer, tokenizer):
    result = answer(["a", END], *GREEDY)
    text = tokenizer.decode(result.model.prompt)
    assert text == "<|start|>user\nwhy does ice float?<|end|>\n<|start|>assistant\n"
    assert f"prompt: {len(result.model.prompt)} tokens" in result.err


def test_model_names_what_is_loaded(answer):
    assert [load["path_or_repo"] for load in answer([END]).loads] == ["any"]


def test_max_tokens_cuts_the_answer_off(answer):
    result = answer(["a"], *GREEDY, "--max-tokens", "5")
    assert result.out == "aaaaa\n"
    assert "generated: 5 tokens" in result.err
    assert "(cut off by --max-tokens)" in result.err


def test_the_default_is_200_tokens(answer):
    assert answer(["a"], *GREEDY).out == "a" * 200 + "\n"


def test_the_prompt_can_come_from_standard_input(answer, tokenizer, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("two\nlines\n"))
    result = answer(["a", END], *GREEDY, prompt=None)
    assert result.code == 0
    assert "user\ntwo\nlines<|end|>" in tokenizer.decode(result.model.prompt)


def test_without_a_prompt_on_a_terminal_nothing_is_loaded(answer, terminal):
    result = answer(["a"], prompt=None)
    assert result.code == 2
    assert result.out == ""
    assert result.err.startswith("error: no prompt given\nhint: ")
    assert result.loads == []


def test_an_empty_prompt_is_an_error(answer):
    result = answer(["a"], prompt="  ")
    assert (result.code, result.out, result.loads) == (2, "", [])
    assert result.err.startswith("error: --prompt is empty\n")


def test_temp_0_takes_the_likeliest_token_and_a_high_one_varies(answer):
    assert set(answer(OPEN, *GREEDY).out.strip()) == {"a"}
    assert len(set(answer(OPEN, "--temp", "5").out.strip())) > 3


def test_the_default_temperature_varies_too(answer):
    result = answer(OPEN, "--seed", "1")
    assert set(result.out.strip()) >= {"a", "b"}
    assert "sampling: temp 0.7" in result.err


def test_top_k_and_top_p_narrow_the_choice(answer):
    assert set(answer(OPEN, "--temp", "9", "--top-k", "2").out.strip()) == {"a", "b"}
    assert set(answer(OPEN, "--temp", "9", "--top-p", "0.8").out.strip()) == {"a", "b"}


def test_sampling_defaults_come_from_the_models_file_and_can_be_turned_off(answer):
    file = {"top_k": 2, "temperature": 0.01}
    assert set(answer(OPEN, "--temp", "9", generation_config=file).out.strip()) == {"a", "b"}
    freed = answer(OPEN, "--temp", "9", "--top-k", "0", generation_config=file)
    assert len(set(freed.out.strip())) > 3


def test_the_same_seed_gives_the_same_answer(answer):
    options = ("--temp", "5", "--max-tokens", "40")
    first, again = (answer(OPEN, *options, "--seed", "7").out for _ in range(2))
    other = answer(OPEN, *options, "--seed", "8").out
    assert first == again != other


def test_the_repetition_penalty_prevents_repeats_inside_its_window(answer):
    # Digits, because the prompt counts too and has none.
    script, options = [list("012345")], (*GREEDY, "--max-tokens", "6")
    assert answer(script, *options).out == "000000\n"
    assert answer(script, *options, "--rep-penalty", "1.5").out == "012345\n"
    # With a window of two tokens the third last one may come back.
    assert answer(script, *options, "--rep-penalty", "1.5", "--rep-ctx", "2").out == "012012\n"
    file = {"repetition_penalty": 1.5}
    assert answer(script, *options, generation_config=file).out == "012345\n"
    off = answer(script, *options, "--rep-penalty", "1", generation_config=file)
    assert off.out == "000000\n"


def test_an_option_without_effect_is_noted(answer):
    result = answer([END], *GREEDY, "--rep-ctx", "9", "--seed", "5")
    assert "note: --rep-ctx has no effect without a repetition penalty" in result.notes
    assert "note: --seed has no effect with --temp 0" in result.notes


@pytest.mark.parametrize("nested", [False, True])
def test_a_prompt_longer_than_the_model_is_made_for_is_noted(answer, nested):
    lengths = {"max_position_embeddings": 5}
    config = {"text_config": lengths} if nested else lengths
    result = answer([END], *GREEDY, config=config)
    assert "tokens and this model is made for 5: it may write nonsense" in " ".join(result.notes)
    enough = answer([END], *GREEDY, config={"max_position_embeddings": 32})
    assert "made for" not in enough.err


@pytest.mark.parametrize(
    ("config", "generation_config"),
    [
        ({"eos_token_id": END_ID}, {}),
        ({"eos_token_id": [END_ID, PAD_ID]}, {}),
        ({}, {"eos_token_id": [END_ID, PAD_ID]}),
        ({"eos_token_id": END_ID}, {"eos_token_id": PAD_ID}),
    ],
)
def test_end_tokens_of_every_file_end_the_answer(answer, config, generation_config):
    ends = [END] if config == {"eos_token_id": END_ID} and not generation_config else []
    for end in ends or [END, "<|pad|>"]:
        result = answer(
            ["a", end, "b"],
            *GREEDY,
            "--max-tokens",
            "3",
            config=config,
            generation_config=generation_config,
        )
        assert result.out == "a\n"


def test_without_such_a_file_only_the_tokenizers_end_token_does(answer):
    assert answer(["a", "<|pad|>", "b"], *GREEDY, "--max-tokens", "3").out != "a\n"
    assert answer(["a", END, "b"], *GREEDY, "--max-tokens", "3").out == "a\n"


def test_stop_ends_the_answer_at_a_token_or_an_id(answer, tokenizer):
    script, cut = ["a", "b", "c", "d", END], "ab\n"
    number = str(tokenizer.encode("c")[0])
    assert answer(script, *GREEDY, "--stop", "c").out == cut
    assert answer(script, *GREEDY, "--stop", number).out == cut
    assert answer(script, *GREEDY, "--stop", "d", "--stop", number).out == cut


def test_a_stop_of_several_tokens_is_refused_before_anything_is_written(answer):
    result = answer(["a"], "--stop", "nosuchtoken")
    assert (result.code, result.out) == (2, "")
    assert "must be a single token" in result.err
    assert "Traceback" not in result.err


def test_min_tokens_holds_every_end_back_and_counts_generated_tokens_only(answer):
    script = [[END, "<|pad|>", "c", "a"]]
    options = (*GREEDY, "--stop", "c", "--max-tokens", "9")
    file = {"eos_token_id": [END_ID, PAD_ID]}
    assert answer(script, *options, generation_config=file).out == "\n"
    held = answer(script, *options, "--min-tokens", "3", generation_config=file)
    assert len(held.model.prompt) > 3
    assert held.out == "aaa\n"
    assert "generated: 4 tokens" in held.err


def test_an_answer_that_ends_at_once_is_explained(answer):
    assert "--min-tokens 1" in answer([END], *GREEDY).notes[0]


def test_a_second_think_end_is_masked_unless_permitted(answer):
    script = ["a", "</think>", "b", ["</think>", "c"], ["</think>", "d"], END]
    assert answer(script, *GREEDY).out == "a</think>bcd\n"
    assert answer(script, *GREEDY, "--multi-think").out == "a</think>b</think></think>\n"


def test_a_think_block_that_the_template_closed_leaves_one_to_the_model(answer, tokenizer):
    script = ["<think>", "a", "</think>", "b", END]
    result = answer(script, *GREEDY, "--no-think")
    assert 4 in result.model.prompt
    assert result.out == "<think>a</think>b\n"


def test_no_think_reaches_the_template(answer, tokenizer):
    result = answer([END], *GREEDY, "--no-think")
    assert tokenizer.decode(result.model.prompt).endswith("<think>\n\n</think>\n\n")


def test_no_think_without_effect_and_a_missing_template_are_noted(answer, tokenizer):
    tokenizer.has_chat_template = False
    result = answer(["a", END], *GREEDY, "--no-think")
    assert tokenizer.decode(result.model.prompt) == "why does ice float?"
    assert len(result.notes) == 2


def test_trust_remote_code_and_cpu_expand_reach_the_loader(answer):
    assert answer([END]).loads[0] == {
        "path_or_repo": "any",
        "trust_remote_code": False,
        "cpu_expand": "auto",
    }
    (load,) = answer([END], "--trust-remote-code", "--cpu-expand", "never").loads
    assert load["trust_remote_code"] is True
    assert load["cpu_expand"] == "never"


def test_the_prompt_is_read_in_pieces_of_the_given_size(answer, monkeypatch):
    import mlx_lm

    seen = []
    stream = mlx_lm.stream_generate

    def note(*args, **options):
        seen.append(options["prefill_step_size"])
        return stream(*args, **options)

    monkeypatch.setattr(mlx_lm, "stream_generate", note)
    plain, pieces = (
        answer(["a", END], *GREEDY),
        answer(["a", END], *GREEDY, "--prefill-step-size", "1000"),
    )
    assert seen == [2048, 1000]
    assert pieces.out == plain.out
    assert answer(["a", END], "--prefill-step-size", "0").code == 2


def test_verbose_says_on_stderr_what_runs_the_model(answer):
    said = "weights: none are packed, MLX's own operations multiply"
    loud, quiet = answer(["a", END], *GREEDY, "--verbose"), answer(["a", END], *GREEDY)
    assert loud.out == quiet.out
    assert "back-end: " in loud.err and said in loud.err
    assert "back-end" not in quiet.err


@pytest.mark.parametrize("choice", ["always", "never"])
def test_cpu_expand_on_a_gpu_is_refused_with_the_reason(answer, monkeypatch, choice):
    gpu = SimpleNamespace(type=mx.DeviceType.gpu)
    monkeypatch.setattr(mx, "default_device", lambda: gpu)
    result = answer([END], "--cpu-expand", choice)
    assert result.code == 2
    assert f"--cpu-expand {choice} does not apply: MLX runs on the GPU" in result.err
    assert result.loads == []


def test_cpu_expand_auto_is_fine_on_a_gpu():
    command._check_cpu_expand("auto")


@pytest.fixture
def awake_while(monkeypatch):
    """What the model was doing when cores were kept awake, in place of really doing that."""
    events = []

    @contextlib.contextmanager
    def cores_awake():
        events.append("awake")
        try:
            yield
        finally:
            events.append("asleep")

    real = command.stream_answer

    def stream_answer(*args):
        events.append("generates")
        real(*args)

    monkeypatch.setattr(awake, "cores_awake", cores_awake)
    monkeypatch.setattr(awake, "why_not_awake", lambda: "")
    monkeypatch.setattr(command, "stream_answer", stream_answer)
    return events


def test_cpu_awake_keeps_cores_awake_while_the_model_generates(answer, awake_while):
    plain = answer(["a", "b", END], *GREEDY)
    assert awake_while == ["generates"]
    awake_while.clear()
    result = answer(["a", "b", END], *GREEDY, "--cpu-awake")
    assert awake_while == ["awake", "generates", "asleep"]
    assert result.out == plain.out == "ab\n"


def test_cpu_awake_on_a_gpu_is_refused_with_the_reason_and_a_hint(answer):
    with force_backend("cuda"):
        result = answer([END], "--cpu-awake")
    assert (result.code, result.out, result.loads) == (2, "", [])
    error, hint = result.err.splitlines()
    expected = "MLX runs on the GPU here" if sys.platform == "linux" else "this works on Linux only"
    assert error == f"error: --cpu-awake does not apply: {expected}"
    assert hint.startswith("hint: leave it out")


@pytest.mark.parametrize("options", [["--ngram-offload"]])
def test_unavailable_options_end_with_2_before_anything_is_loaded(answer, options):
    result = answer([END], *options)
    assert (result.code, result.out, result.loads) == (2, "", [])
    assert result.err.startswith(f"error: {options[0]} is not available yet in this version\n")


def test_what_libraries_print_stays_out_of_the_answer(answer, monkeypatch):
    real = command.encode_prompt

    def chatty(*args, **kwargs):
        print("a library says something")
        return real(*args, **kwargs)

    monkeypatch.setattr(command, "encode_prompt", chatty)
    result = answer(["a", END], *GREEDY)
    assert result.out == "a\n"
    assert "a library says something" in result.err


def test_errors_of_the_loader_are_one_line_and_code_2(answer, monkeypatch):
    result = answer(["a"], model=Breaks(CheckpointError("x: tensor y is missing", hint="get it")))
    assert (result.code, result.out) == (2, "")
    assert result.err == "error: x: tensor y is missing\nhint: get it\n"


class Breaks(nn.Module):
    """A model that raises when it is first used."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def make_cache(self):
        raise self.error

    def __call__(self, *args, **kwargs):
        raise self.error


def test_code_of_a_model_that_fails_is_one_error(answer, monkeypatch, tmp_path):
    said = f"error: {tmp_path}: the model cannot be run: no such rotation\nhint: "
    result = answer(["a"], model=Breaks(ValueError("no such rotation")))
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(said)

    monkeypatch.setattr(Breaks, "make_cache", lambda self: [])
    result = answer(["a"], model=Breaks(TypeError("no such rotation\nThere are: 1, 2")))
    assert (result.code, result.out) == (2, "")
    assert said in result.err
    result = answer(["a"], model=Breaks(RuntimeError("std::bad_cast")))
    assert "the model cannot be run: a number is too large\n" in result.err
    with pytest.raises(RuntimeError, match="no device"):
        answer(["a"], model=Breaks(RuntimeError("no device")))


def test_a_fault_of_ours_is_not_the_models(answer, monkeypatch):
    monkeypatch.setattr(processors, "build_sampler", lambda sampling: {}.__getitem__)
    with pytest.raises(KeyError, match="array"):
        answer(["a"], *GREEDY)


def assert_interrupted(result, after: int) -> None:
    assert result.code == 130
    assert result.out == "a" * after + "\n"
    assert f"generated: {after} tokens" in result.err
    assert "(interrupted)" in result.err
    assert result.err.endswith("\ninterrupted\n")


def test_ctrl_c_ends_with_130_and_says_what_was_done_so_far(answer, monkeypatch):
    def interrupted(responses, out, statistics):
        def some():
            for number, response in enumerate(responses):
                if number == 3:
                    raise KeyboardInterrupt
                yield response

        return real(some(), out, statistics)

    real = command.stream_answer
    monkeypatch.setattr(command, "stream_answer", interrupted)
    assert_interrupted(answer(["a"], *GREEDY), after=3)


def test_ctrl_c_before_the_first_token_says_only_that(answer):
    result = answer(["a"], model=Breaks(KeyboardInterrupt()))
    assert (result.code, result.out, result.err) == (130, "", "interrupted\n")


def test_ctrl_c_that_a_library_keeps_to_itself_still_ends(answer, monkeypatch):
    def deaf(*args, **kwargs):
        for number, response in enumerate(real(*args, **kwargs)):
            if number == 3:
                with contextlib.suppress(KeyboardInterrupt):
                    signal.raise_signal(signal.SIGINT)
            yield response

    real = mlx_lm.stream_generate
    monkeypatch.setattr(mlx_lm, "stream_generate", deaf)
    assert_interrupted(answer(["a"], *GREEDY), after=4)
    assert answer(["a", END], *GREEDY).code == 0


def test_a_terminal_that_lacks_a_letter_shows_a_question_mark(answer, tokenizer, monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert answer(["a", *tokenizer.encode("é"), "b", END], *GREEDY).code == 0
    assert raw.getvalue() == b"a?b\n"


@pytest.fixture
def trust(monkeypatch):
    """``trust(model_type, local=True, **options)``: (tokenizer, model) code that may run."""
    from turboquant_mlx.checkpoint import loader, source

    def trust(tmp_path, model_type, *, local=True, **options):
        seen = {}

        def load_model(path, *, trust_remote_code, **_):
            seen["model"] = trust_remote_code
            return None, {"model_type": model_type}

        def load_tokenizer(path, config, *, trust_remote_code, **_):
            seen["tokenizer"] = trust_remote_code

        monkeypatch.setattr(loader, "load_model", load_model)
        monkeypatch.setattr(loader, "load_tokenizer", load_tokenizer)
        monkeypatch.setattr(loader, "has_tokenizer", lambda path: True)
        for module in (loader, source):
            monkeypatch.setattr(module, "resolve", lambda *_, **__: tmp_path)
        command.load_model(str(tmp_path) if local else "some/Repo", **options)
        return seen["tokenizer"], seen["model"]

    return trust


def test_code_of_a_model_is_trusted_when_told_so(trust, tmp_path):
    assert trust(tmp_path, "llama") == (False, False)
    assert trust(tmp_path, "llama", trust_remote_code=True) == (True, True)


def test_a_local_kimi_k3_folder_is_trusted_for_its_tokenizer_only(trust, tmp_path):
    assert trust(tmp_path, "kimi_k3") == (True, False)


def test_kimi_k3_from_the_hub_is_not(trust, tmp_path):
    assert trust(tmp_path, "kimi_k3", local=False) == (False, False)


@pytest.fixture
def packed(monkeypatch):
    """How many packed layers and QJL sketches the model has, and what is done to these."""
    from turboquant_mlx.layers import cpu, install

    state = SimpleNamespace(layers=["layer"] * 5, sketches=3, switched=[])

    def set_qjl(model, enabled):
        state.switched.append(enabled)
        return state.sketches

    monkeypatch.setattr(install, "set_qjl", set_qjl)
    monkeypatch.setattr(cpu, "expanded_bytes", lambda model: len(state.layers))
    return state


def test_fast_switches_qjl_off(answer, packed):
    assert answer(["a", END], *GREEDY).notes == []
    assert packed.switched == []
    assert answer(["a", END], *GREEDY, "--fast").notes == []
    assert packed.switched == [False]


def test_options_that_a_model_gives_nothing_to_do_are_noted(answer, packed):
    options = (*GREEDY, "--fast", "--cpu-expand", "always")
    assert answer(["a", END], *options).notes == []
    packed.layers, packed.sketches = [], 0
    assert answer(["a", END], *options).notes == [
        "note: --cpu-expand has no effect: this model has no weights to expand",
        "note: --fast has no effect: this model has no QJL correction",
    ]
