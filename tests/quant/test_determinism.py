"""Two processes write the same bytes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import hashlib
import mlx.core as mx
import numpy as np
from turboquant_mlx.quant.spec import QuantSpec
from turboquant_mlx.quant.weight import quantize_weight

w = mx.array(np.random.default_rng(0).standard_normal((400, 576)).astype(np.float32))
for spec in (
    QuantSpec(bits=3, rotation_block=192, qjl=True),
    QuantSpec(bits=6, group_size=32, scale_layout="log8", rotation_block=64),
    QuantSpec(code="ternary", rotation_block=192),
    QuantSpec(bits=3, window_bits=8, group_size=192, rotation_block=192),
):
    for name, a in quantize_weight(w, spec).arrays().items():
        print(name, hashlib.sha256(np.array(a).tobytes()).hexdigest())
"""


def output(**environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


@pytest.fixture(scope="module")
def expected() -> str:
    return output(PYTHONHASHSEED="1")


@pytest.mark.parametrize(
    "environment",
    [
        {"PYTHONHASHSEED": "2"},
        {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "VECLIB_MAXIMUM_THREADS": "1"},
        {"OPENBLAS_NUM_THREADS": "7", "OMP_NUM_THREADS": "7"},
    ],
    ids=str,
)
def test_another_process_makes_the_same_bytes(expected, environment):
    assert expected.count("\n") == 7 + 4 + 4 + 4
    assert output(**environment) == expected
