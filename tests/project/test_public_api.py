"""The names that ``import turboquant_mlx`` promises."""

from __future__ import annotations

import importlib
import types

import pytest

import turboquant_mlx
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
