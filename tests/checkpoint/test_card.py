"""The README.md of a converted model."""

from __future__ import annotations

import shlex

import pytest
import yaml

from turboquant_mlx.checkpoint.card import model_card, read_front_matter
from turboquant_mlx.convert.command import build_parser
from turboquant_mlx.convert.options import ConvertOptions

REPORT = {
    "source": "owner/Some-Model",
    "output_path": "/home/somebody/models/Some-Model-3bit",
    "parameters": 134515008,
    "source_bytes": 269030016,
    "stored_bytes": 98000000,
    "bits_per_weight": 3.26,
    "by_kind": [
        {
            "role": "mlp",
            "method": "3-bit scalar, groups of 64",
            "modules": 90,
            "weights": 79626240,
            "bytes": 32348160,
            "bits_per_weight": 3.25,
        }
    ],
    "kept": [{"reason": "embedding", "modules": 1, "parameters": 28311552, "bytes": 56623104}],
}
OPTIONS = {
    "bits": 3,
    "group_size": 64,
    "rotation": "hadamard",
    "use_qjl": False,
    "dtype": None,
    "protect_expert_layers": [],
    "protect_bits": 3,
    "expert_layer_tiers": {},
    "quantize_extras": False,
    "extras_bits": 4,
}


def card(report=REPORT, options=OPTIONS, source_card=None) -> tuple[dict, str]:
    """(front matter as YAML reads it, the text below)."""
    text = model_card(report=report, options=options, source_card=source_card)
    _, front, body = text.split("---\n", 2)
    return yaml.safe_load(front), body


def command(body: str) -> list[str]:
    [line] = [line for line in body.splitlines() if line.startswith("turboquant-convert")]
    return shlex.split(line)


def test_front_matter_says_what_the_hub_wants_to_know():
    front, _ = card()
    assert front == {
        "library_name": "mlx",
        "pipeline_tag": "text-generation",
        "base_model": "owner/Some-Model",
        "base_model_relation": "quantized",
        "tags": ["mlx", "turboquant", "quantized"],
    }


def test_licence_and_language_come_from_the_card_of_the_source():
    source = (
        "---\nlicense: other\nlicense_name: a-licence\nlicense_link: 'https://x.org/a: b'\n"
        "language:\n- en\n- no\ntags: [x]\nbase_model: other/model\n---\n# Text\nlicense: mit\n"
    )
    front, _ = card(source_card=source)
    assert front["license"] == "other" and front["license_name"] == "a-licence"
    assert front["license_link"] == "https://x.org/a: b"
    assert front["language"] == ["en", "no"]
    assert front["base_model"] == "owner/Some-Model" and "x" not in front["tags"]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("base_model: owner/Base", "owner/Base"),
        ("base_model:\n- owner/Base", "owner/Base"),
        ("base_model: [a/b, c/d]", ["a/b", "c/d"]),
        ("base_model: ../Base", None),
        ("license: mit", None),
    ],
)
def test_a_local_folder_descends_from_what_its_card_says(tmp_path, said, expected):
    front, _ = card({**REPORT, "source": str(tmp_path)}, source_card=f"---\n{said}\n---\n")
    assert front.get("base_model") == expected
    assert "base_model_relation" not in front


def test_a_folder_of_the_hubs_cache_is_the_repository(tmp_path):
    cached = tmp_path / "models--owner--Some-Model" / "snapshots" / ("0" * 40)
    front, body = card({**REPORT, "source": str(cached)})
    assert front["base_model"] == "owner/Some-Model"
    assert command(body)[2] == "owner/Some-Model"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("---\nlicense: apache-2.0\n---", {"license": "apache-2.0"}),
        ('---\r\nlicense: "mit" \r\n---\r\n', {"license": "mit"}),
        ("\ufeff---\nlicense: mit # a comment\n---\n", {"license": "mit"}),
        ("---\nlanguage: [en, 'de']\n---\n", {"language": ["en", "de"]}),
        ("---\ntags:\n  - a\n  - b\nx:\n  y: z\n---\n", {"tags": ["a", "b"]}),
        ("---\nlicense: &x mit\na: *x\nb: !!python/none x\nc: |\n  text\n---\n", {}),
        ("---\n- a\n- b\n---\n", {}),
        ("---\nlicense: mit\n", {}),
        ("# no front matter\n---\nlicense: mit\n---\n", {}),
        ("", {}),
    ],
)
def test_front_matter_of_any_card(text, expected):
    assert read_front_matter(text) == expected


def test_a_hostile_card_cannot_break_ours():
    source = '---\nlicense: "mit\\n---\n# owned"\nlanguage:\n- "a\\": b"\n- x: y\n---\n'
    front, body = card(source_card=source)
    assert front["library_name"] == "mlx" and "owned" not in body


def test_the_command_that_made_it_can_be_run_again():
    _, body = card()
    assert command(body) == [
        "turboquant-convert",
        *("--hf-path", "owner/Some-Model"),
        *("--mlx-path", "Some-Model-3bit"),
        *("--bits", "3", "--group-size", "64", "--rotation", "hadamard"),
    ]


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"balance": False, "bits": 4, "codec": "scalar", "use_qjl": True, "rotation_seed": 7},
        {"error_feedback": True, "feedback_text": "text.txt", "streaming": True},
        {"protect_expert_layers": (0, 1, 5), "protect_bits": 4, "ternary_experts": True},
        {"quantize_extras": True, "extras_bits": 8, "keep_mtp": True, "dtype": "float16"},
        {"balance_text": "text.txt", "attn_bits": 4, "mlp_bits": 2, "mlp_group_size": 64},
        {"target_bpw": 3.2, "attn_bits": 4},
    ],
    ids=repr,
)
def test_the_command_says_the_options_that_were_used(values):
    options = ConvertOptions(**values)
    words = command(card(options=options.to_dict())[1])
    given = vars(build_parser().parse_args(words[1:]))
    assert given.pop("hf_path") == "owner/Some-Model"
    assert given.pop("mlx_path") == "Some-Model-3bit"
    assert ConvertOptions(**given) == options


def test_every_kind_of_option_is_in_the_command():
    options = {
        **OPTIONS,
        "use_qjl": True,
        "dtype": "bfloat16",
        "protect_expert_layers": [0, 1, 5],
        "quantize_extras": True,
    }
    words = command(card(options=options)[1])
    assert words[words.index("--dtype") + 1] == "bfloat16"
    assert words[words.index("--protect-expert-layers") + 1] == "0,1,5"
    assert words[words.index("--protect-bits") + 1] == "3"
    assert words[words.index("--extras-bits") + 1] == "4"
    assert words[words.index("--use-qjl") + 1].startswith("--")


def test_the_tiers_file_is_shown():
    _, body = card(options={**OPTIONS, "expert_layer_tiers": {"0": "4", "1": "ternary"}})
    assert "--expert-layer-tiers tiers.json" in body
    assert '{"0": "4", "1": "ternary"}' in body


def test_true_numbers_and_tables():
    _, body = card()
    assert "3.26 bits" in body
    assert "134,515,008 parameters; 269.03 MB before, 98.00 MB after (2.75 times smaller)" in body
    row = "| mlp | 3-bit scalar, groups of 64 | 90 | 79,626,240 | 32.35 MB | 3.25 |"
    assert row in body
    assert "| embedding | 1 | 28,311,552 | 56.62 MB |" in body


def test_how_to_run_it():
    _, body = card()
    assert "turboquant-generate --model Some-Model-3bit --prompt" in body
    assert 'load("Some-Model-3bit")' in body
    assert "mlx_lm.generate --model Some-Model-3bit --trust-remote-code" in body


def test_paths_of_the_machine_stay_out(tmp_path):
    report = {**REPORT, "source": str(tmp_path / "Local Model")}
    texts = {name: str(tmp_path / "x.txt") for name in ("balance_text", "feedback_text")}
    front, body = card(report, {**OPTIONS, **texts})
    assert "base_model" not in front
    assert "somebody" not in body and str(tmp_path) not in body
    assert command(body)[2] == "Local Model"


def test_a_local_folder_that_looks_like_a_repository_is_no_base_model(tmp_path, monkeypatch):
    (tmp_path / "owner" / "Some-Model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    front, body = card()
    assert "base_model" not in front
    assert command(body)[2] == "Some-Model"


def test_odd_names_stay_text():
    report = {**REPORT, "source": "./we`ird|na*me", "output_path": "out/a b$(x)"}
    _, body = card(report)
    assert "we\\`ird\\|na\\*me, its quantized weights" in body
    assert command(body)[1:5] == ["--hf-path", "we`ird|na*me", "--mlx-path", "a b$(x)"]
