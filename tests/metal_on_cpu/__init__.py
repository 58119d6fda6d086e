"""Runs Metal kernels on a CPU, to test them where there is no Mac.

``run(kernel, inputs=..., ...)`` takes a kernel made by ``mx.fast.metal_kernel`` and the arguments
of its call. The Metal text is the one that MLX generates for this call; it is compiled with the
system's C++ compiler and run thread by thread. What a GPU would do silently wrong raises
:class:`KernelFault`. docs/concepts/metal-on-cpu.md tells how it works and what it cannot see.
"""

from metal_on_cpu.clang import clang_diagnostics, find_clang
from metal_on_cpu.compiler import CompileError, missing_compiler
from metal_on_cpu.launch import ALLOWABLE, KernelFault, on_cpu, run
from metal_on_cpu.trace import Traced, trace

__all__ = [
    "ALLOWABLE",
    "CompileError",
    "KernelFault",
    "Traced",
    "clang_diagnostics",
    "find_clang",
    "missing_compiler",
    "on_cpu",
    "run",
    "trace",
]
