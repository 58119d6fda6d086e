"""The forecast of how long quantizing takes."""

from __future__ import annotations

import pytest

from turboquant_mlx.quant import forecast
from turboquant_mlx.quant.forecast import expected_seconds
from turboquant_mlx.quant.spec import QuantSpec

TRELLIS = QuantSpec(bits=3, window_bits=8, group_size=192, rotation_block=192)


@pytest.fixture(autouse=True)
def untried():
    forecast._seconds_per_weight.cache_clear()
    yield
    forecast._seconds_per_weight.cache_clear()


def test_a_forecast_is_proportional_to_the_weights():
    one = expected_seconds(1_000_000, TRELLIS)
    assert 0 < one < 60
    assert expected_seconds(5_000_000, TRELLIS) == pytest.approx(5 * one)


def test_each_kind_of_code_is_tried_once(monkeypatch):
    tried = set()

    def quantize_weight(weight, spec, **options):
        tried.add(spec)

    monkeypatch.setattr(forecast, "quantize_weight", quantize_weight)
    for spec in (
        TRELLIS,
        TRELLIS.with_(group_size=512, window_bits=8, rotation_block=512),
        TRELLIS.with_(group_size=32, window_bits=8),
        TRELLIS.with_(bits=2, window_bits=8),
        QuantSpec(bits=3, rotation_block=192),
        QuantSpec(bits=3, rotation_block=192, group_size=16),
        QuantSpec(code="ternary", rotation_block=192),
    ):
        assert expected_seconds(1000, spec) > 0
    assert len(tried) == 5
    assert {(s.code, s.bits, s.window_bits) for s in tried} == {
        ("scalar", 3, 8),
        ("scalar", 2, 8),
        ("scalar", 3, 3),
        ("ternary", 2, 2),
    }


@pytest.mark.parametrize("backend", ["numpy", "mlx"])
def test_both_back_ends_can_be_tried(monkeypatch, backend):
    monkeypatch.setattr(forecast, "default_backend", lambda: backend)
    monkeypatch.setattr(forecast, "_TRIAL_ROWS", {"numpy": 64, "mlx": 64})
    assert expected_seconds(1000, TRELLIS) > 0
    assert expected_seconds(1000, QuantSpec(bits=2, qjl=True)) > 0
