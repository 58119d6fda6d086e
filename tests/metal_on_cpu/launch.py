"""Runs one call of a Metal kernel on the CPU, and reports what went wrong in it."""

from __future__ import annotations

import ctypes
import functools
import re
import subprocess
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from metal_on_cpu.compiler import build, metal_line, missing_compiler, runtime
from metal_on_cpu.trace import Parameter, Traced, as_arrays, trace

# Names of the findings, in the order of `Kind` in msl/runtime.h.
KINDS = (
    "barrier",
    "simd",
    "exited-lanes",
    "absent-lane",
    "lane-argument",
    "bounds",
    "uninitialised",
    "race",
    "read-only",
    "shift",
    "index",
    "division",
    "threadgroup-memory",
    "unwritten",
)
# Those after which a kernel can go on, so that a test may permit them.
ALLOWABLE = ("exited-lanes", "lane-argument", "uninitialised", "race", "shift", "unwritten")
MOST_THREADS = 1024  # of a threadgroup, on every Apple GPU

_RUNNING = threading.Lock()  # the runtime has one state


class KernelFault(AssertionError):
    """A kernel did what a GPU would not survive or would do differently each time.

    ``kind`` is one of ``KINDS``; ``lines`` are the Metal lines that the message names.
    """

    def __init__(self, message: str, kind: str, lines: tuple[int, ...]):
        super().__init__(message)
        self.kind = kind
        self.lines = lines


class _Triple(ctypes.Structure):
    _fields_ = [(axis, ctypes.c_uint32) for axis in "xyz"]


class _Buffer(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("offset", ctypes.c_uint64),
        ("element", ctypes.c_uint32),
        ("output", ctypes.c_uint32),
        ("filled", ctypes.c_uint32),
        ("name", ctypes.c_char_p),
    ]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("kernel", ctypes.c_void_p),
        ("buffers", ctypes.POINTER(_Buffer)),
        ("count", ctypes.c_uint32),
        ("grid", _Triple),
        ("group", _Triple),
        ("allow", ctypes.c_uint32),
    ]


class _Place(ctypes.Structure):
    _fields_ = [("address", ctypes.c_uint64), ("line", ctypes.c_uint32)]


class _Report(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_uint32),
        ("found", ctypes.c_uint32),
        ("places", _Place * 2),
        ("text", ctypes.c_char * 1024),
    ]


@dataclass
class _Memory:
    """What a buffer of the kernel holds: ``array`` may have any strides."""

    name: str
    array: np.ndarray
    output: bool = False
    filled: bool = False

    def buffer(self) -> _Buffer:
        steps = [(n - 1) * s for n, s in zip(self.array.shape, self.array.strides, strict=True)]
        before = -sum(step for step in steps if step < 0)
        size = before + sum(step for step in steps if step > 0) + self.array.itemsize
        return _Buffer(
            self.array.ctypes.data - before,
            size if self.array.size else 0,
            before,
            self.array.itemsize,
            self.output,
            self.filled,
            self.name.encode(),
        )


def run(kernel: Callable, *, allow: Iterable[str] = (), **call) -> list[np.ndarray]:
    """The outputs of ``kernel(**call)`` as numpy arrays; bfloat16 comes as float32 (exact).

    ``kernel`` was made by ``mx.fast.metal_kernel``, and ``call`` holds the arguments of its call:
    ``inputs`` (arrays or numbers), ``grid``, ``threadgroup``, ``output_shapes``, ``output_dtypes``,
    and if wanted ``template`` and ``init_value``. ``allow`` names findings (of ``ALLOWABLE``) that
    are no fault of this kernel.

    Raises KernelFault for a finding, CompileError if the text does not compile, ValueError for
    arguments that MLX would refuse, RuntimeError where there is no compiler.
    """
    outputs = on_cpu(kernel, allow=allow)(**call)
    return [np.array(o.astype(mx.float32) if o.dtype == mx.bfloat16 else o) for o in outputs]


def on_cpu(kernel: Callable, *, allow: Iterable[str] = ()) -> Callable[..., list[mx.array]]:
    """A function with the signature of ``kernel`` that runs it here, to stand in for it."""
    allowed = set(allow)
    if allowed - set(ALLOWABLE):
        unknown = ", ".join(sorted(allowed - set(ALLOWABLE)))
        raise ValueError(f"not allowable: {unknown} (can be: {', '.join(ALLOWABLE)})")
    bits = sum(1 << KINDS.index(name) for name in allowed)

    def call(
        *,
        inputs,
        grid,
        threadgroup,
        output_shapes,
        output_dtypes,
        template=None,
        init_value=None,
        verbose=False,
        stream=None,
    ) -> list[mx.array]:
        if missing_compiler():
            raise RuntimeError(missing_compiler())
        arrays = as_arrays(inputs)
        described = {"output_shapes": output_shapes, "output_dtypes": output_dtypes, "grid": grid}
        described |= {"threadgroup": threadgroup, "template": template, "init_value": init_value}
        traced = trace(kernel, arrays, **{k: v for k, v in described.items() if v is not None})
        if verbose:
            print(traced.text)
        sizes = [min(a, b) for a, b in zip(threadgroup, grid, strict=True)]
        if min(sizes) < 1 or np.prod(sizes) > MOST_THREADS:
            raise ValueError(
                f"a threadgroup of {tuple(sizes)}: it can have 1 to {MOST_THREADS} threads"
            )
        outputs = [
            _output(shape, dtype, init_value)
            for shape, dtype in zip(output_shapes, output_dtypes, strict=True)
        ]
        memory = _inputs(traced, arrays)
        names = traced.buffers[len(memory) :]
        for parameter, output in zip(names, outputs, strict=True):
            memory.append(_Memory(parameter.name, output, True, init_value is not None))
        _launch(traced, build(traced), memory, grid, threadgroup, bits)
        return [_to_mlx(o, d) for o, d in zip(outputs, output_dtypes, strict=True)]

    return call


def _output(shape, dtype: mx.Dtype, init_value) -> np.ndarray:
    array = _to_numpy(mx.full(shape, init_value or 0).astype(dtype)).copy()
    if init_value is None:  # bytes that look like no result
        array[...] = np.frombuffer(b"\xcd" * array.itemsize, array.dtype)[0]
    return array


def _to_numpy(array: mx.array) -> np.ndarray:
    """The array's own memory, whatever its strides; bfloat16 as its bits."""
    if array.dtype == mx.bfloat16:
        array = array.view(mx.uint16)
    mx.eval(array)
    return np.asarray(memoryview(array))


def _to_mlx(array: np.ndarray, dtype: mx.Dtype) -> mx.array:
    result = mx.array(array)
    return result.view(mx.bfloat16) if dtype == mx.bfloat16 else result


def _inputs(traced: Traced, arrays: list[mx.array]) -> list[_Memory]:
    """The memory of the inputs and of their shapes and strides, in the order of the parameters."""
    memory, left = [], list(traced.buffers)
    for array in arrays:
        values = _to_numpy(mx.contiguous(array) if traced.row_contiguous else array)
        name = left.pop(0).name
        memory.append(_Memory(name, values))
        strides = [stride // values.itemsize for stride in values.strides]
        for suffix, type_, content in (
            ("shape", "const constant int", np.array(values.shape, np.int32)),
            ("strides", "const constant int64_t", np.array(strides, np.int64)),
            ("ndim", "const constant int", np.array([values.ndim], np.int32)),
        ):
            if left and _is(left[0], f"{name}_{suffix}", type_):
                memory.append(_Memory(left.pop(0).name, content))
    return memory


def _is(parameter: Parameter, name: str, type_: str) -> bool:
    # An input of that name would have the type int32_t.
    return parameter.name == name and parameter.type == type_


@functools.cache
def _runtime() -> ctypes.CDLL:
    library = ctypes.CDLL(str(runtime()))
    library.msl_launch.restype = ctypes.POINTER(_Report)
    return library


@functools.cache
def _kernel(path: Path) -> ctypes.c_void_p:
    return ctypes.cast(ctypes.CDLL(str(path)).msl_thread, ctypes.c_void_p)


def _launch(traced: Traced, path: Path, memory: list[_Memory], grid, threadgroup, allow) -> None:
    buffers = (_Buffer * len(memory))(*[m.buffer() for m in memory])
    launch = _Launch(
        _kernel(path), buffers, len(memory), _Triple(*grid), _Triple(*threadgroup), allow
    )
    with _RUNNING:
        report = _runtime().msl_launch(ctypes.byref(launch))
        if not report:
            return
        found = report.contents
        kind, text = KINDS[found.kind], found.text.decode()
        places = [(place.address, place.line) for place in found.places]
    lines = []
    for i, (address, line) in enumerate(places):
        if f"{{{i}}}" not in text:
            continue
        line = line or _line_of(path, address)
        lines.append(line)
        shown = f"line {line}: `{metal_line(traced, line)}`" if line else "an unknown line"
        text = text.replace(f"{{{i}}}", shown)
    raise KernelFault(f"{kind} in {traced.function}\n{text}", kind, tuple(lines))


def _line_of(library: Path, address: int) -> int:
    """The Metal line of an address in the library; 0 if nobody knows."""
    command = ["addr2line", "-i", "-e", str(library), hex(address)]
    try:
        answer = subprocess.run(command, capture_output=True, text=True).stdout
    except FileNotFoundError:
        return 0
    match = re.search(r"kernel\.metal:(\d+)", answer)
    return int(match[1]) if match else 0
