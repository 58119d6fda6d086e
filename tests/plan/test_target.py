"""--convert target-bpw=...: the size and the bits that turboquant-convert promises."""

from __future__ import annotations

from pathlib import Path

import pytest

from converting import Workshop, convert
from turboquant_mlx.checkpoint.source import inspect_folder
from turboquant_mlx.errors import OptionError
from turboquant_mlx.plan.conversion import convert_projection, parse_options, plan_converted
from turboquant_mlx.plan.headers import open_model
from turboquant_mlx.plan.machine import with_overrides
from turboquant_mlx.plan.projection import Plan, Request
from turboquant_mlx.plan.weights import UNASSIGNED


@pytest.fixture(scope="module")
def workshop(tmp_path_factory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("targets"), codec="scalar")


@pytest.fixture(scope="module")
def llama(workshop) -> Path:
    return workshop.source("llama")


def planned(source: Path, text: str) -> Plan:
    text += ",codec=scalar"
    return plan_converted(open_model(str(source)), text, with_overrides(None, 16, None), Request())


def bits_of(plan: Plan) -> float:
    """Bits per weight of all modules in the manifest, from sizes alone."""
    from turboquant_mlx.plan.weights import read_manifest

    manifest = read_manifest(plan.model.config, plan.model.tensors)
    assert manifest is not None
    stored = sum(
        info.nbytes
        for name, info in plan.model.tensors.items()
        if name == UNASSIGNED or name.rpartition(".")[0] in manifest.modules
    )
    return 8 * stored / sum(entry.num_weights for entry in manifest.modules.values())


@pytest.mark.parametrize("target", ["2.6", "3", "3.2", "3.4,attn-bits=4", "4"])
def test_size_and_header_are_those_of_the_target(llama, target):
    plan = planned(llama, f"target-bpw={target}")
    wanted = float(target.partition(",")[0])
    assert wanted - 0.01 < bits_of(plan) <= wanted
    assert plan.weights.precision == f"TurboQuant, {wanted:.2f} bits per quantized weight"
    assert plan.weights.bits is None
    assert plan.extras["conversion"]["options"]["target_bpw"] == wanted


def test_beyond_the_largest_width_nothing_is_added(llama):
    plan = planned(llama, "target-bpw=8")
    assert plan.weights.total == planned(llama, "bits=4").weights.total
    assert plan.weights.bits == 4
    [notice] = plan.extras["conversion"]["notices"]
    assert "more than 4 bits everywhere take" in notice


def test_what_the_converter_refuses_is_refused_in_its_words(llama, tmp_path):
    for text in ("target-bpw=1", "target-bpw=3,attn-bits=3,mlp-bits=3"):
        with pytest.raises(OptionError, match="is out of reach") as refused:
            planned(llama, text)
        flags = [word for part in text.split(",") for word in f"--{part}".split("=")]
        done = convert(llama, tmp_path / "out", "--no-balance", "--codec", "scalar", *flags)
        assert done.code == 2
        assert done.err.startswith(f"error: {refused.value.message}\n")


@pytest.mark.parametrize("target", ["2.8", "3.1"])
def test_the_result_stays_within_it(llama, workshop, target):
    text = f"target-bpw={target},codec=scalar"
    predicted = convert_projection(open_model(str(llama)), parse_options(text), text)
    done = workshop.converted(llama, "--target-bpw", target, balanced=True)
    real = inspect_folder(done.folder).weight_bytes
    assert real <= predicted.weight_bytes <= 1.05 * real
