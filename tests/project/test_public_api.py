"""The names that ``import turboquant_mlx`` promises."""

from __future__ import annotations

import importlib
import types
from pathlib import Path

import pytest

import tiny
import turboquant_mlx
from turboquant_mlx.errors import OptionError
from turboquant_mlx.quant.spec import QuantSpec


def test_every_public_name_is_there():
    for name in turboquant_mlx.__all__:
        assert getattr(turboquant_mlx, name) is not None
        assert name in dir(turboquant_mlx)


def test_public_names_are_the_objects_themselves():
    assert turboquant_mlx.QuantSpec is QuantSpec
    loader = importlib.import_module("turboquant_mlx.checkpoint.loader")
    assert turboquant_mlx.load is loader.load


def test_convert_is_a_package_and_a_function(monkeypatch):
    """Whatever was imported before: the import system binds the package to the same name."""
    pipeline = importlib.import_module("turboquant_mlx.convert.pipeline")
    assert isinstance(turboquant_mlx.convert, types.ModuleType)
    monkeypatch.setattr(pipeline, "convert", lambda path, bits: (path, bits))
    assert turboquant_mlx.convert("model", bits=3) == ("model", 3)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'quantise'"):
        turboquant_mlx.quantise  # noqa: B018


def test_plan_is_a_package_and_a_function(tmp_path):
    assert isinstance(turboquant_mlx.plan, types.ModuleType)
    tiny.build_source(tmp_path / "m", "llama")
    plan = turboquant_mlx.plan(tmp_path / "m", context=512, ram_gb=16)
    assert plan.verdict.runnable
    assert plan.to_dict()["projection"]["context"] == 512
    converted = turboquant_mlx.plan(str(tmp_path / "m"), convert="bits=3", ram_gb=16)
    assert converted.to_dict()["conversion"]["exact"]
    assert converted.weights.total < plan.weights.total


@pytest.mark.parametrize("size", [0, -1, 1e9, float("nan")])
def test_plan_refuses_machines_of_no_size(size):
    with pytest.raises(OptionError, match="ram_gb"):
        turboquant_mlx.plan("nowhere", ram_gb=size)


def test_the_library_page_names_what_is_public():
    text = (Path(__file__).resolve().parents[2] / "docs/reference/library.md").read_text()
    for name in set(turboquant_mlx.__all__) - {"__version__"}:
        assert f"`{name}`" in text, name
