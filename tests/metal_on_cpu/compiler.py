"""Compiles traced kernels and the runtime, and keeps what was compiled in the temporary folder."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from metal_on_cpu.trace import Traced
from metal_on_cpu.translate import TranslationError, prepare, translate

SHIM = Path(__file__).parent / "msl"
COMMON = ["-std=c++20", "-fPIC", "-U_FORTIFY_SOURCE", f"-I{SHIM}"]
# The kernel's accesses to memory are announced by the calls of the thread sanitizer; the library
# behind them is ours (memory.cpp), so the flag is given to the compiler and not to the linker.
KERNEL = [
    *COMMON,
    "-O1",
    "-g1",
    "-w",
    "-Wno-narrowing",  # newer GCCs refuse a half made from a float in braces
    "-Werror=return-type",
    "-fsanitize=thread,shift,bounds,integer-divide-by-zero",
    "-fsingle-precision-constant",
    "-ffp-contract=off",
    "-fno-exceptions",
    "-fno-strict-aliasing",
    "-fno-tree-loop-distribute-patterns",  # a loop that became a memset would not be announced
    "-fsigned-char",
]
PREPROCESS = ["-E", "-x", "c++", "-nostdinc", "-D__METAL__=1", "-D__METAL_VERSION__=310"]


class CompileError(ValueError):
    """The compiler refused a kernel; the message shows its words and the Metal lines."""


@functools.cache
def missing_compiler() -> str:
    """Why kernels cannot be run on this machine; "" if they can."""
    if not sys.platform.startswith("linux"):
        return "Metal kernels are run on a CPU under Linux only"
    if not _command():
        return "no g++ that compiles half-precision C++20"
    return ""


@functools.cache
def _command() -> list[str]:
    """The C++ compiler and the flags that depend on its version; [] if none works."""
    program = os.environ.get("METAL_ON_CPU_CXX") or shutil.which("g++")
    # Newer compilers keep half-precision values in float within an expression unless told not to.
    for extra in (["-fexcess-precision=16"], []):
        command = [program or "", *KERNEL, *extra, "-x", "c++", "-fsyntax-only", "-"]
        probe = "#include <source_location>\n_Float16 twice(_Float16 x) { return x + x; }\n"
        if (
            program
            and not subprocess.run(command, input=probe, text=True, capture_output=True).returncode
        ):
            return [program, *extra]
    return []


@functools.cache
def _folder() -> Path:
    """Holds the runtime, the precompiled shim and the kernels for this compiler and this shim."""
    command = _command()
    version = subprocess.run([command[0], "--version"], capture_output=True, text=True).stdout
    state = hashlib.sha256(repr((command, version, KERNEL, PREPROCESS)).encode())
    for path in [*sorted(SHIM.iterdir()), *sorted(Path(__file__).parent.glob("tr*.py"))]:
        state.update(path.read_bytes())
    # Of this user only: what lies there is loaded into the process.
    root = Path(tempfile.gettempdir()) / f"metal-on-cpu-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    if root.stat().st_uid != os.getuid():
        raise PermissionError(f"{root} belongs to another user")
    folder = root / state.hexdigest()[:16]
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=root) as work:
            made = Path(work) / "made"
            made.mkdir()
            _build_base(made)
            try:
                made.rename(folder)
            except OSError:
                if not folder.exists():  # else another process was faster
                    raise
    return folder


def _build_base(folder: Path) -> None:
    program, *extra = _command()
    runtime = [str(SHIM / "fibres.cpp"), str(SHIM / "memory.cpp")]
    (folder / "shim.h").write_text('#include "metal.h"\n')
    for command in (
        [program, *KERNEL, *extra, "-x", "c++-header", "shim.h", "-o", "shim.h.gch"],
        [program, *COMMON, "-O2", "-shared", *runtime, "-o", "runtime.so"],
    ):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the Metal runtime does not compile:\n{done.stderr}")


def runtime() -> Path:
    """The shared library that runs kernels; one for all of them."""
    return _folder() / "runtime.so"


def build(traced: Traced) -> Path:
    """The shared library of the kernel, compiled unless it was before. Raises CompileError."""
    folder = _folder()
    key = hashlib.sha256(traced.text.encode()).hexdigest()[:16]
    # The name of a function may be longer than a file name can be.
    library = folder / f"{traced.function[:80]}_{key}.so"
    if library.exists():
        return library
    program, *extra = _command()
    with tempfile.TemporaryDirectory(dir=folder) as work:
        try:
            cpp = translate(traced, preprocess(traced, program, []))
        except TranslationError as error:
            raise CompileError(_message(traced, [(error.line, str(error))])) from None
        (Path(work) / "kernel.ii").write_text(cpp)
        compile_ = [program, *KERNEL, *extra, f"-I{folder}", "-include", "shim.h", "-x", "c++"]
        compile_ += ["-fno-diagnostics-show-caret", "-fdiagnostics-color=never"]
        _run([*compile_, "-c", "kernel.ii", "-o", "kernel.o"], work, traced)
        # The runtime brings the C++ library along; to search it takes half of the linker's time.
        link = ["-shared", f"-L{folder}", "-l:runtime.so", "-Wl,-rpath,$ORIGIN", "-o", "kernel.so"]
        link += ["-nodefaultlibs", "-lgcc", "-lm", "-lc"]
        _run([program, "kernel.o", *link], work, traced)
        os.replace(Path(work) / "kernel.so", library)
    return library


def preprocess(traced: Traced, program: str, flags: list[str]) -> str:
    """The kernel with its own macros expanded, and markers that keep the line numbers."""
    text = f'#line 1 "kernel.metal"\n{prepare(traced)}'
    done = subprocess.run(
        [program, *PREPROCESS, *flags, "-"], input=text, capture_output=True, text=True
    )
    if done.returncode:
        raise CompileError(_message(traced, diagnostics(done.stderr)))
    return done.stdout


def _run(command: list[str], folder: str, traced: Traced) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        found = diagnostics(done.stderr)
        raise CompileError(_message(traced, found) if found else done.stderr)


def diagnostics(output: str) -> list[tuple[int, str]]:
    """(line in the Metal text, message) for each line of a compiler's output that names one."""
    pattern = r"kernel\.metal:(\d+):(?:\d+:)? ((?:fatal error|error|warning): .*)"
    return [(int(line), message) for line, message in re.findall(pattern, output)]


def _message(traced: Traced, found: list[tuple[int, str]]) -> str:
    shown = [show(traced, line, message) for line, message in found[:10]]
    return "\n".join([f"{traced.function} does not compile", *shown])


def show(traced: Traced, line: int, message: str) -> str:
    """A message with the line of the Metal text it is about."""
    return f"line {line}: {message}\n    {metal_line(traced, line)}"


def metal_line(traced: Traced, line: int) -> str:
    lines = traced.text.split("\n")
    return lines[line - 1].strip() if 0 < line <= len(lines) else ""
