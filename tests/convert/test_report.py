"""The summary of a conversion, as a table and as JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from turboquant_mlx.convert.report import (
    ConvertReport,
    format_bytes,
    format_columns,
    format_seconds,
)

REPORT = ConvertReport(
    output_path="smol-3bit",
    source="SmolLM2-135M-Instruct",
    parameters=134_515_008,
    source_bytes=269_060_552,
    stored_bytes=100_000_000,
    quantized_weights=106_168_320,
    quantized_bytes=43_262_000,
    bits_per_weight=3.26,
    by_kind=[
        {
            "role": "attention",
            "method": "3-bit g64",
            "modules": 120,
            "weights": 26_542_080,
            "bytes": 10_816_000,
            "bits_per_weight": 3.2601,
        },
        {
            "role": "mlp",
            "method": "4-bit g64 + QJL",
            "modules": 90,
            "weights": 79_626_240,
            "bytes": 32_446_000,
            "bits_per_weight": 3.2598,
        },
    ],
    kept=[{"reason": "embedding", "modules": 1, "parameters": 28_311_552, "bytes": 56_623_104}],
    dropped=[
        {"reason": "vision", "tensors": 12, "bytes": 2_000_000},
        {"reason": "a tied head", "tensors": None, "bytes": None},
    ],
    notices=["a note"],
    seconds=31.4,
)


def test_table() -> None:
    assert REPORT.format_table().splitlines() == [
        "Converted SmolLM2-135M-Instruct to smol-3bit",
        "",
        "  parameters       134,515,008",
        "  size             269.1 MB before, 100.0 MB after (2.69 times smaller)",
        "  bits per weight  3.26 (all stored bytes of the quantized layers)",
        "  time             31.4 s",
        "",
        "  quantized  as               modules     weights     size  bits/weight",
        "  attention  3-bit g64            120  26,542,080  10.8 MB         3.26",
        "  mlp        4-bit g64 + QJL       90  79,626,240  32.4 MB         3.26",
        "",
        "  left as it was  modules  parameters     size",
        "  embedding             1  28,311,552  56.6 MB",
        "",
        "  not taken over  tensors    size",
        "  vision               12  2.0 MB",
        "  a tied head           -       -",
    ]


def test_empty_tables_are_left_out() -> None:
    text = replace(REPORT, kept=[], dropped=[]).format_table()
    assert "left as it was" not in text
    assert "not taken over" not in text


def test_json_holds_the_same_and_names_its_layout() -> None:
    content = json.loads(json.dumps(REPORT.to_dict()))
    assert content["schema"] == 1
    assert content["parameters"] == 134_515_008
    assert content["by_kind"][1]["method"] == "4-bit g64 + QJL"
    assert ConvertReport(**{k: v for k, v in content.items() if k != "schema"}) == REPORT


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (999_960, "1.0 MB"),
        (1_234_567, "1.2 MB"),
        (5_000_000_000_000_000, "5000.0 TB"),
    ],
)
def test_sizes_are_decimal(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.04, "0.0 s"), (119.94, "119.9 s"), (3725, "62 min 5 s")]
)
def test_durations(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_columns_without_rows_are_no_table() -> None:
    assert format_columns(("a", "b"), [], left=1) == []
