"""What kernels take on the GPU itself, as NVIDIA's profiler counts it.

MLX encodes a graph anew at each evaluation. That takes the host 5 to 15 microseconds for a kernel,
so a chain of shorter ones shows the host's time, whatever the kernels take. Where PyTorch for CUDA
is installed its profiler sees MLX's kernels too, for it looks at all of a process's work.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx

RUNS = 3
WARM_UP_S = 0.1


@cache
def has_gpu_clock() -> bool:
    """Whether there is a profiler to ask."""
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available() and torch.zeros(1).cuda().is_cuda


class Operation(NamedTuple):
    """What the GPU did, copies included; in nanoseconds, as floats would lose these."""

    name: str
    start_ns: int
    end_ns: int


def operations_of(run: Callable[[], Any]) -> list[Operation]:
    """The GPU's operations in one ``run``, in the order in which they began."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        mx.eval(run())
        mx.synchronize()
    found = [
        Operation(e.name(), e.start_ns(), e.start_ns() + e.duration_ns())
        for e in profiler.profiler.kineto_results.events()
        if e.device_type() == torch.autograd.DeviceType.CUDA
    ]
    return sorted(found, key=lambda operation: operation.start_ns)


def busy_seconds(operations: list[Operation]) -> float:
    """Seconds in which at least one of these runs."""
    busy_ns, until = 0, 0
    for operation in operations:
        busy_ns += max(0, operation.end_ns - max(operation.start_ns, until))
        until = max(until, operation.end_ns)
    return busy_ns * 1e-9


def gpu_seconds(run: Callable[[], Any]) -> float:
    """Seconds that the GPU works in one ``run``, the least of a few."""
    end = time.perf_counter() + WARM_UP_S
    while time.perf_counter() < end:  # a GPU that idles lowers its clock
        mx.eval(run())
    mx.synchronize()
    return min(busy_seconds(operations_of(run)) for _ in range(RUNS))
