"""The options of turboquant-generate, as far as they can be judged without a model."""

import subprocess
import sys
import time

import pytest

from turboquant_mlx.errors import OptionError
from turboquant_mlx.generate import parser

LISTED = """
    --model --prompt --max-tokens --temp --top-p --top-k --rep-penalty --rep-ctx --no-think
    --multi-think --stop --fast --ngram-offload --trust-remote-code --min-tokens --kv-bits
    --kv-k-bits --kv-v-bits --kv-min-tokens --kv-group-size --seed --cpu-expand
    --cpu-awake
"""


def parse(*options):
    return parser.build_parser().parse_args(["--model", "m", *options])


def test_help_lists_every_option_and_the_defaults_that_matter():
    text = " ".join(parser.build_parser().format_help().split())
    assert [flag for flag in LISTED.split() if f"{flag} " not in text] == []
    assert "default: 200" in text
    assert "default: 0.7, whatever generation_config.json says" in text
    assert "default: 256" in text


def test_defaults():
    args = parse()
    assert (args.max_tokens, args.temp, args.min_tokens) == (200, 0.7, 0)
    assert (args.top_p, args.top_k, args.rep_penalty, args.rep_ctx) == (None,) * 4
    assert (args.seed, args.stop, args.cpu_expand) == (None, [], "auto")
    assert not any(
        (args.no_think, args.multi_think, args.fast, args.trust_remote_code, args.cpu_awake)
    )


def test_temperatures():
    assert [parse("--temp", text).temp for text in ("0", "1e-6", "1.5", "1e6")] == [
        0,
        1e-6,
        1.5,
        1e6,
    ]


def test_stop_can_be_repeated():
    assert parse("--stop", "</assistant>", "--stop", "24").stop == ["</assistant>", "24"]


def test_a_prompt_can_begin_with_a_dash():
    assert parse("--prompt=-1 + 2 = ?").prompt == "-1 + 2 = ?"


@pytest.mark.parametrize(
    "options",
    [
        ["--temp", "-1"],
        ["--temp", "nan"],
        ["--temp", "inf"],
        ["--temp", "warm"],
        # One over it would be infinite in 32 bits, or logits over it all the same.
        ["--temp", "1e-39"],
        ["--temp", "9e-7"],
        ["--temp", "1e46"],
        ["--top-p", "-0.1"],
        ["--top-p", "1.5"],
        ["--top-p", "nan"],
        ["--top-k", "-1"],
        ["--top-k", "2.5"],
        ["--rep-penalty", "-1"],
        ["--rep-penalty", "nan"],
        # mlx-lm would read a window of 0 as "everything".
        ["--rep-ctx", "0"],
        ["--max-tokens", "0"],
        ["--max-tokens", "-1"],
        ["--min-tokens", "-1"],
        ["--seed", "-1"],
        ["--seed", str(2**64)],
        ["--cpu-expand", "perhaps"],
        # No abbreviations: a longer option added later would change their meaning.
        ["--max", "5"],
        ["--unknown"],
    ],
)
def test_nonsense_is_a_usage_error_on_one_line(options, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(*options)
    assert stop.value.code == 2
    err = capsys.readouterr().err.splitlines()
    assert err[0].startswith("error: ")
    assert options[0] in err[0]
    assert err[1].startswith("hint: ")
    assert len(err) == 2


def test_model_is_required(capsys):
    with pytest.raises(SystemExit) as stop:
        parser.build_parser().parse_args(["--prompt", "hello"])
    assert stop.value.code == 2
    assert "--model" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--ngram-offload"]])
def test_options_without_machinery_are_refused_with_the_reason(options):
    with pytest.raises(OptionError, match=f"{options[0]} is not available yet") as refusal:
        parser.refuse_unavailable(parse(*options))
    assert refusal.value.hint


def test_nothing_is_refused_that_was_not_given():
    parser.refuse_unavailable(parse())


def test_more_tokens_at_least_than_at_most_is_refused():
    with pytest.raises(OptionError, match=r"--min-tokens 5 .* --max-tokens 4"):
        parser.refuse_contradictions(parse("--min-tokens", "5", "--max-tokens", "4"))
    parser.refuse_contradictions(parse("--min-tokens", "4", "--max-tokens", "4"))


def test_help_needs_no_mlx():
    code = (
        "import sys\n"
        "from turboquant_mlx.generate.command import main\n"
        "try:\n    main(['--help'])\n"
        "except SystemExit as stop:\n    assert stop.code == 0\n"
        "heavy = {'mlx', 'mlx_lm', 'numpy', 'transformers', 'huggingface_hub'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_help_answers_in_half_a_second():
    def seconds():
        start = time.perf_counter()
        command = [sys.executable, "-m", "turboquant_mlx.generate", "--help"]
        subprocess.run(command, check=True, capture_output=True)
        return time.perf_counter() - start

    # The best of some: the machine may be busy with something else.
    assert min(seconds() for _ in range(4)) < 0.5
