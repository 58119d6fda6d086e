"""What kernels take on the GPU itself, as NVIDIA's profiler counts it.

MLX encodes a graph anew at each evaluation. That takes the host 5 to 15 microseconds for a kernel,
so a chain of shorter ones shows the host's time, whatever the kernels take. Where PyTorch for CUDA
is installed its profiler sees MLX's kernels too, for it looks at all of a process's work.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.core as mx

RUNS = 3
WARM_UP_S = 0.05


@cache
def has_gpu_clock() -> bool:
    """Whether there is a profiler to ask."""
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available() and torch.zeros(1).cuda().is_cuda


def kernels_of(run: Callable[[], Any]) -> list[tuple[str, float]]:
    """Names and seconds of the GPU's operations in one ``run``, copies included."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        mx.eval(run())
        mx.synchronize()
    return [
        (event.name(), event.duration_ns() * 1e-9)
        for event in profiler.profiler.kineto_results.events()
        if event.device_type() == torch.autograd.DeviceType.CUDA
    ]


def gpu_seconds(run: Callable[[], Any]) -> float:
    """Seconds that the GPU works in one ``run``, the least of a few; none may overlap."""
    end = time.perf_counter() + WARM_UP_S
    while time.perf_counter() < end:  # a GPU that idles lowers its clock
        mx.eval(run())
    mx.synchronize()
    return min(sum(seconds for _, seconds in kernels_of(run)) for _ in range(RUNS))
