"""A second opinion on the Metal text: clang, with address spaces that are told apart.

g++ drops the address spaces, so it lets a threadgroup pointer pass for a device pointer. clang,
which Metal's compiler is built on, knows them as attributes. The text is checked and not run.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Callable

from metal_on_cpu.compiler import SHIM, diagnostics, preprocess, show
from metal_on_cpu.trace import Traced, trace
from metal_on_cpu.translate import TranslationError, for_clang

FLAGS = ["-std=c++14", "-fsyntax-only", f"-I{SHIM}", "-include", "strict.h", "-Wall", "-Wextra"]
# Metal's compiler takes newer C++ too; a parameter that MLX adds may stay unused.
FLAGS += ["-Wno-c++17-extensions", "-Wno-unused-parameter", "-Wno-unknown-pragmas"]
# Our header declares more than it defines and than a kernel uses.
FLAGS += ["-Wno-undefined-inline", "-Wno-undefined-internal", "-Wno-unused-command-line-argument"]
FLAGS += ["-fno-caret-diagnostics", "-fno-color-diagnostics", "-ferror-limit=0"]


@functools.cache
def find_clang() -> tuple[str, str]:
    """(program, "") or ("", why there is none)."""
    program = os.environ.get("METAL_ON_CPU_CLANG") or shutil.which("clang++") or ""
    if not program:
        return "", "clang++ is not installed"
    if _compile(program, "bfloat twice(bfloat x) { return x + x; }\n").returncode:
        return "", f"{program} is older than clang 17 or lacks the headers of C++"
    return program, ""


def clang_diagnostics(kernel: Callable, *, inputs, **call) -> list[str]:
    """What clang has to say about the text of ``kernel(inputs=inputs, **call)``; [] if nothing.

    Each entry holds an error or a warning and the Metal line. Takes the arguments of the call.
    Raises RuntimeError where there is no clang.
    """
    program, reason = find_clang()
    if reason:
        raise RuntimeError(reason)
    return check(trace(kernel, inputs, **call), program)


def check(traced: Traced, program: str) -> list[str]:
    try:
        cpp = for_clang(traced, preprocess(traced, program, ["-Wno-everything"]))
    except TranslationError as error:
        return [show(traced, error.line, f"error: {error}")]
    done = _compile(program, cpp)
    found = diagnostics(done.stderr)
    if done.returncode and not found:
        raise RuntimeError(f"clang failed on {traced.function}:\n{done.stderr}")
    return [show(traced, line, message) for line, message in found]


def _compile(program: str, text: str) -> subprocess.CompletedProcess[str]:
    command = [program, *FLAGS, "-x", "c++", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True)
