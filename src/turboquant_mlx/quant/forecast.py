"""How long quantizing will take, from a trial on this machine."""

from __future__ import annotations

import time
from functools import cache

import mlx.core as mx
import numpy as np

from .decode import default_backend
from .spec import QuantSpec
from .threads import usable_cpus
from .trellis import LARGE_GROUP
from .weight import quantize_weight

_TRIAL_ROWS = {"numpy": 512, "mlx": 16384}  # in NumPy for each thread
_TRIAL_WIDTH = 512


def expected_seconds(num_weights: int, spec: QuantSpec) -> float:
    """Expected time of ``quantize_weight`` for so many weights, in seconds.

    The first call for a kind of code tries it on some hundred thousand random weights, which takes
    a moment (about a second on a CPU; on a GPU the programs are compiled first). It knows
    nothing of reading and writing files.

    Args:
        num_weights: weights of all tensors with this code, in total.
        spec: the code.
    """
    group_size = LARGE_GROUP if spec.group_size >= LARGE_GROUP else 64
    trial = QuantSpec(
        code=spec.code,
        bits=spec.bits,
        window_bits=spec.window_bits,
        group_size=group_size,
        scale_layout=spec.scale_layout,
        rotation_block=1 if spec.rotation_block == 1 else _TRIAL_WIDTH,
        qjl=spec.qjl,
    )
    return num_weights * _seconds_per_weight(trial, default_backend())


@cache
def _seconds_per_weight(spec: QuantSpec, backend: str) -> float:
    rows = _TRIAL_ROWS[backend] * (usable_cpus() if backend == "numpy" else 1)
    values = np.random.default_rng(0).standard_normal((rows, _TRIAL_WIDTH), np.float32)
    weight = mx.array(values).astype(mx.bfloat16)
    mx.eval(weight)
    # What happens only once is in the first call (a GPU's programs are compiled) or in the second
    # (helper processes are started once there has been work for them).
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        quantize_weight(weight, spec, backend=backend)
        seconds.append(time.perf_counter() - started)
    return min(seconds) / values.size
