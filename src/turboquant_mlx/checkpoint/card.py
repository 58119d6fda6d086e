"""README.md of a converted model: what it is, how it was made, what it costs, how to run it.

All numbers come from the conversion's own report; nothing here is computed from nominal widths.
Paths of the machine that converted do not appear in the card, only the last parts of names.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import __version__

# Taken over from the card of the source: what a licence demands, and what describes the text.
_KEPT_KEYS = ("license", "license_name", "license_link", "language", "pipeline_tag")
_TAGS = ("mlx", "turboquant", "quantized")
_REPO_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
# How the hub's client names the folder of a downloaded model.
_CACHED = re.compile(r"/models--([\w.-]+?)--([\w.-]+)/snapshots/[^/]+/?\Z")
_PLAIN_YAML = re.compile(r"[A-Za-z][A-Za-z0-9._/-]*")
# YAML would read these as something other than a text ("no" is Norwegian here).
_NOT_TEXT = {"no", "yes", "on", "off", "true", "false", "null", "y", "n"}
_FRONT_MATTER = re.compile(r"\A\ufeff?---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|\Z)", re.DOTALL)
_MAX_FRONT_MATTER = 65_536

# Options that have a value always, but an effect only beside another one.
_ONLY_WITH = {
    "protect_bits": "protect_expert_layers",
    "extras_bits": "quantize_extras",
    "extras_group_size": "quantize_extras",
}

# Options that are told only when they are off, and those whose value is a path.
_ON_BY_DEFAULT = ("balance",)
_FILES = ("balance_text", "feedback_text")


def model_card(
    *, report: Mapping[str, Any], options: Mapping[str, Any], source_card: str | None = None
) -> str:
    """Write the model card.

    Args:
        report: the conversion's report as plain values: "source", "output_path", "parameters",
            "source_bytes", "stored_bytes", "bits_per_weight", "by_kind" and "kept" rows.
        options: the conversion's options by name, as the manifest holds them.
        source_card: text of the source's README.md, for its licence; None when there is none.

    Returns:
        Markdown with YAML front matter.
    """
    name = _last_part(report["output_path"])
    source = _source_name(str(report["source"]))
    sections = [
        _front_matter(report, source_card),
        f"# {_inline(name)}",
        f"{_inline(source)}, its quantized weights stored at {report['bits_per_weight']:.2f} bits "
        "each. Converted with `turboquant-mlx-kit` for MLX.",
        "## How to run it",
        *_how_to_run(name),
        "## How it was made",
        f"To reproduce it with turboquant-mlx-kit {__version__}:",
        _code("bash", _command(report, options)),
        *_tiers(options),
        "## What is in it",
        _totals(report),
        *_tables(report),
    ]
    return "\n\n".join(sections) + "\n"


def read_front_matter(card: str) -> dict[str, str | list[str]]:
    """Top-level texts and lists of texts of a card's YAML front matter.

    Only the plain forms that cards use are read; anything else is left out, never an error.
    """
    match = _FRONT_MATTER.match(card[:_MAX_FRONT_MATTER])
    values: dict[str, str | list[str]] = {}
    if match is None:
        return values
    key: str | None = None
    for line in match[1].splitlines():
        if item := re.fullmatch(r"\s*-\s+(.+)", line):
            entries = values.get(key) if key else None
            text = _yaml_text(item[1])
            if isinstance(entries, list) and text:
                entries.append(text)
        elif pair := re.fullmatch(r"([A-Za-z_]\w*):(?:\s+(.*))?", line):
            key, text = pair[1], (pair[2] or "").strip()
            if text.startswith("[") and text.endswith("]"):
                items = [_yaml_text(item) for item in text[1:-1].split(",")]
                values[key] = [item for item in items if item]
            elif not text:
                values[key] = []
            elif plain := _yaml_text(text):
                values[key] = plain
    return {key: value for key, value in values.items() if value}


def _yaml_text(text: str) -> str:
    """The text of a plain or quoted scalar; "" for one that is something else."""
    text = text.strip()
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    text = re.sub(r"\s+#.*", "", text)
    return "" if re.match(r"[&*!|>{}\[\]%@`'\"]", text) else text


def _front_matter(report: Mapping[str, Any], source_card: str | None) -> str:
    kept = read_front_matter(source_card or "")
    values: dict[str, str | Sequence[str]] = {"library_name": "mlx"}
    values |= {key: kept[key] for key in _KEPT_KEYS if key in kept}
    values.setdefault("pipeline_tag", "text-generation")
    if repository := _repository(str(report["source"])):
        values["base_model"] = repository
        values["base_model_relation"] = "quantized"
    elif ancestors := _ancestors(kept.get("base_model", [])):
        # of a folder no more is known than what its own card says that it comes from
        values["base_model"] = ancestors
    values["tags"] = _TAGS
    lines = []
    for key, value in values.items():
        if isinstance(value, str):
            lines.append(f"{key}: {_quoted(value)}")
        else:
            lines += [f"{key}:", *(f"- {_quoted(item)}" for item in value)]
    return "\n".join(["---", *lines, "---"])


def _quoted(text: str) -> str:
    # A JSON text is a YAML text too.
    plain = _PLAIN_YAML.fullmatch(text) and text.lower() not in _NOT_TEXT
    return text if plain else json.dumps(text)


def _how_to_run(name: str) -> list[str]:
    folder = shlex.quote(name)
    return [
        "Install turboquant-mlx-kit first (on Linux with its extra `cpu` or `cuda`).",
        _code("bash", f'turboquant-generate --model {folder} --prompt "Why is the sky blue?"'),
        _code(
            "python",
            "from mlx_lm import generate\n"
            "from turboquant_mlx import load\n\n"
            f"model, tokenizer = load({json.dumps(name)})\n"
            'print(generate(model, tokenizer, prompt="The sky is", max_tokens=50))',
        ),
        "Stock mlx-lm loads it as well where that package is installed. Its flag lets the file "
        "`turboquant_model.py` of this folder run, which does nothing but call the package:",
        _code(
            "bash",
            f'mlx_lm.generate --model {folder} --trust-remote-code --prompt "Why is the sky blue?"',
        ),
    ]


def _command(report: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    words = [
        "turboquant-convert",
        "--hf-path",
        _source_name(str(report["source"])),
        "--mlx-path",
        _last_part(report["output_path"]),
    ]
    for key, value in options.items():
        if key in _ON_BY_DEFAULT:
            words += [] if value else [f"--no-{key}"]
            continue
        if value is None or value is False or value in ([], (), {}, ""):
            continue
        if key in _ONLY_WITH and not options.get(_ONLY_WITH[key]):
            continue
        if key == "bits" and options.get("target_bpw"):
            continue  # each layer has its own, and the two are refused together
        words.append("--" + key.replace("_", "-"))
        if isinstance(value, Mapping):
            words.append("tiers.json")
        elif isinstance(value, (list, tuple)):
            words.append(",".join(str(item) for item in value))
        elif key in _FILES:
            words.append(_last_part(value))
        elif value is not True:
            words.append(str(value))
    return shlex.join(words)


def _tiers(options: Mapping[str, Any]) -> list[str]:
    tiers = options.get("expert_layer_tiers")
    return ["with `tiers.json`:", _code("json", json.dumps(tiers))] if tiers else []


def _totals(report: Mapping[str, Any]) -> str:
    before, after = report["source_bytes"], report["stored_bytes"]
    return (
        f"{report['parameters']:,} parameters; {_size(before)} before, {_size(after)} after "
        f"({before / after:.2f} times smaller). Bits per weight count everything that is stored "
        "for the quantized weights: codes, scales, tables and rotation signs."
    )


def _tables(report: Mapping[str, Any]) -> list[str]:
    tables = []
    rows: list[tuple[str, ...]]
    if report.get("by_kind"):
        rows = [
            (
                row["role"],
                row["method"],
                f"{row['modules']:,}",
                f"{row['weights']:,}",
                _size(row["bytes"]),
                f"{row['bits_per_weight']:.2f}",
            )
            for row in report["by_kind"]
        ]
        header = ("quantized", "as", "modules", "weights", "size", "bits per weight")
        tables.append(_table(header, rows, left=2))
    if report.get("kept"):
        rows = [
            (row["reason"], f"{row['modules']:,}", f"{row['parameters']:,}", _size(row["bytes"]))
            for row in report["kept"]
        ]
        tables.append(_table(("left as it was", "modules", "parameters", "size"), rows, left=1))
    return tables


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], *, left: int) -> str:
    rule = [":---" if i < left else "---:" for i in range(len(header))]
    lines = [header, rule, *([_inline(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _code(language: str, text: str) -> str:
    return f"```{language}\n{text}\n```"


def _inline(text: str) -> str:
    """A text that stays one line, and that Markdown takes as it is."""
    return re.sub(r"([\\`*_|<>\[\]])", r"\\\1", " ".join(str(text).split()))


def _repository(source: str) -> str | None:
    """The hub repository that a source names, or whose copy in the hub's cache it is."""
    if cached := _CACHED.search(Path(source).as_posix()):
        return f"{cached[1]}/{cached[2]}"
    return source if _REPO_ID.fullmatch(source) and not Path(source).is_dir() else None


def _ancestors(named: str | Sequence[str]) -> str | list[str] | None:
    """Those of the names in a card's ``base_model`` that are repositories."""
    names = [named] if isinstance(named, str) else named
    known = [name for name in names if _REPO_ID.fullmatch(name)]
    return known[0] if len(known) == 1 else known or None


def _source_name(source: str) -> str:
    return _repository(source) or _last_part(source)


def _last_part(path: str) -> str:
    name = Path(path).name or Path(path).resolve().name
    return " ".join(name.split()) or "model"


def _size(n_bytes: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= factor:
            return f"{n_bytes / factor:.2f} {unit}"
    return f"{n_bytes} B"
