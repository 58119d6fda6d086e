"""The Metal text that MLX generates for one call of a custom kernel, and its signature."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

# What the source of a kernel may ask about a thread: an expression over ``msl::Position at``.
ATTRIBUTES = {
    "dispatch_quadgroups_per_threadgroup": "(at.nominal_simdgroups * 8)",
    "dispatch_simdgroups_per_threadgroup": "at.nominal_simdgroups",
    "dispatch_threads_per_threadgroup": "uint3(at.nominal.x, at.nominal.y, at.nominal.z)",
    "grid_origin": "uint3(0u)",
    "grid_size": "uint3(at.grid.x, at.grid.y, at.grid.z)",
    "quadgroup_index_in_threadgroup": "(at.index / 4)",
    "quadgroups_per_threadgroup": "((at.actual.x * at.actual.y * at.actual.z + 3) / 4)",
    "simdgroup_index_in_threadgroup": "at.simdgroup",
    "simdgroups_per_threadgroup": "at.simdgroups",
    "thread_execution_width": "32u",
    "thread_index_in_quadgroup": "(at.index % 4)",
    "thread_index_in_simdgroup": "at.lane",
    "thread_index_in_threadgroup": "at.index",
    "thread_position_in_grid": "uint3(at.in_grid.x, at.in_grid.y, at.in_grid.z)",
    "thread_position_in_threadgroup": "uint3(at.in_group.x, at.in_group.y, at.in_group.z)",
    "threadgroup_position_in_grid": "uint3(at.group.x, at.group.y, at.group.z)",
    "threadgroups_per_grid": "uint3(at.groups.x, at.groups.y, at.groups.z)",
    "threads_per_grid": "uint3(at.grid.x, at.grid.y, at.grid.z)",
    "threads_per_simdgroup": "32u",
    "threads_per_threadgroup": "uint3(at.actual.x, at.actual.y, at.actual.z)",
}


@dataclass(frozen=True)
class Parameter:
    """One parameter of the generated function.

    ``type`` is the C++ type with the address space and without ``*`` or ``&``; ``attribute`` is the
    Metal name of a thread attribute, or "" for a buffer.
    """

    name: str
    type: str
    reference: bool
    attribute: str


@dataclass(frozen=True)
class Traced:
    """A kernel as MLX would hand it to Metal, for one call."""

    function: str  # name of the generated function
    text: str  # all of the Metal text but the helpers that MLX puts before every kernel
    instance: str  # the function with its template arguments
    parameters: tuple[Parameter, ...]
    body_start: int  # offset in ``text`` of the character after the function's opening brace
    body_end: int  # offset of the function's closing brace
    row_contiguous: bool  # MLX copies inputs that are not

    @property
    def buffers(self) -> list[Parameter]:
        return [p for p in self.parameters if not p.attribute]


def as_arrays(inputs) -> list[mx.array]:
    return [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]


def trace(kernel: Callable, inputs, **call) -> Traced:
    """The text for ``kernel(inputs=inputs, **call)``. Needs no GPU; nothing is run.

    MLX checks the arguments as it would in a real call, and its ValueError is passed on.
    """
    found: list[list] = []

    def note(step: dict) -> None:
        if step["type"] == "primitive" and step["name"] == "CustomKernel":
            found.append(step["arguments"])

    call = {**call, "stream": call.get("stream") or mx.gpu}
    mx.export_function(
        note, lambda *arrays: kernel(inputs=list(arrays), **call), *as_arrays(inputs)
    )
    if len(found) != 1 or len(found[0]) < 10 or not isinstance(found[0][9], bool):
        raise RuntimeError("this version of MLX describes a custom kernel in another way")
    function, text, row_contiguous = found[0][0], found[0][1], found[0][9]

    opening = re.search(rf"\[\[kernel\]\] void {re.escape(function)}\(", text)
    if not opening:
        raise RuntimeError(f"{function}: no kernel function in the text that MLX generated")
    body_start = text.index(") {\n", opening.end()) + 3
    instantiation = text.rfind("template [[host_name(")
    instance = function
    if instantiation > body_start:
        instance = re.search(r"decltype\((.*)\) ", text[instantiation:]).group(1)
    end = text.rindex("}", 0, instantiation if instantiation > body_start else len(text))
    lines = text[opening.end() : body_start - 3].split(",\n")
    parameters = tuple(_parameter(line) for line in lines if line.strip())
    return Traced(function, text, instance, parameters, body_start, end, row_contiguous)


def _parameter(line: str) -> Parameter:
    match = re.fullmatch(r"\s*(.+?)([*&]?) (\w+) \[\[(\w+)(?:\(\d+\))?\]\]", line)
    if not match or (match[4] != "buffer" and match[4] not in ATTRIBUTES):
        raise RuntimeError(f"a parameter of a kind not known here: {line.strip()}")
    attribute = "" if match[4] == "buffer" else match[4]
    return Parameter(match[3], match[1], match[2] == "&", attribute)
