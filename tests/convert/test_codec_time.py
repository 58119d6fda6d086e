"""The announcement of how long trellis codes take."""

from __future__ import annotations

import pytest

from turboquant_mlx.convert import codec_time
from turboquant_mlx.convert.codec_time import codec_notices
from turboquant_mlx.convert.options import ConvertOptions
from turboquant_mlx.convert.recipe import ModuleInfo, plan_modules

MODULES = [
    ModuleInfo("model.embed_tokens", "embedding", (32000, 4096)),
    ModuleInfo("model.layers.0.self_attn.q_proj", "linear", (4096, 4096)),
    ModuleInfo("model.layers.0.mlp.switch_mlp.up_proj", "switch", (8, 1024, 4096)),
]
FEW = [ModuleInfo("model.layers.0.self_attn.q_proj", "linear", (1024, 1024))]


@pytest.mark.parametrize(
    ("rate", "options", "text"),
    [
        (1e-6, {}, "of 50 million weights takes about 50.3 s here"),
        (1e-5, {}, "of 50 million weights takes about 8 min 23 s here"),
        (1e-6, {"ternary_experts": True}, "of 17 million weights takes about 16.8 s here"),
    ],
)
def test_long_searches_are_announced(monkeypatch, rate, options, text):
    monkeypatch.setattr(codec_time, "expected_seconds", lambda count, spec: rate * count)
    plan = plan_modules(MODULES, ConvertOptions(codec="trellis", **options))
    (line,) = codec_notices(plan, MODULES)
    assert line == f"the search for trellis codes {text}"


def test_short_work_and_plain_codes_are_not(monkeypatch):
    monkeypatch.setattr(codec_time, "expected_seconds", lambda count, spec: 1e-9 * count)
    assert codec_notices(plan_modules(MODULES, ConvertOptions(codec="trellis")), MODULES) == []
    monkeypatch.setattr(codec_time, "expected_seconds", None)
    assert codec_notices(plan_modules(FEW, ConvertOptions(codec="trellis")), FEW) == []
    assert codec_notices(plan_modules(MODULES, ConvertOptions(codec="scalar")), MODULES) == []
