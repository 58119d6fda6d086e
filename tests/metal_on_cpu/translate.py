"""From the traced Metal text to C++.

Metal is C++ with address spaces, so the text stays as it is, with three changes: attributes go,
threadgroup variables become references to memory that the runtime keeps for the group, and a
function is added that calls the kernel for one thread. Line numbers stay those of the Metal text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from metal_on_cpu.trace import ATTRIBUTES, Traced

_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*<metal_\w+>[^\n]*", re.MULTILINE)
_MARKER = re.compile(r'^# (\d+) "([^"]*)"[^\n]*\n?', re.MULTILINE)


class TranslationError(ValueError):
    """Metal text that no Metal compiler would take. ``line`` counts from 1 in the traced text."""

    def __init__(self, message: str, line: int):
        super().__init__(message)
        self.line = line


def prepare(traced: Traced) -> str:
    """The text up to the end of the function, without attributes and Metal's own includes.

    It still has to go through the preprocessor: a macro may declare threadgroup variables.
    """
    header = _INCLUDE.sub("", traced.text[: traced.body_start])
    kernel = header.index(f"[[kernel]] void {traced.function}(")
    signature = re.sub(r"\[\[.*?\]\]", "", header[kernel:])
    body = _INCLUDE.sub("", traced.text[traced.body_start : traced.body_end + 1])
    return f"{header[:kernel]}__attribute__((noinline)) {signature}{body}\n"


def translate(traced: Traced, preprocessed: str) -> str:
    """C++ for the preprocessed text of :func:`prepare`, with the function ``msl_thread``."""
    return _threadgroup_variables(preprocessed, traced.function) + _caller(traced)


def for_clang(traced: Traced, preprocessed: str) -> str:
    """As :func:`translate`, for a compiler that knows address spaces: nothing but a check."""
    use = f"\nauto msl_instance() {{ return &{traced.instance}; }}\n"
    return _threadgroup_variables(preprocessed, traced.function, keep=True) + use


def _caller(traced: Traced) -> str:
    arguments, buffers = [], 0
    for parameter in traced.parameters:
        if parameter.attribute:
            arguments.append(ATTRIBUTES[parameter.attribute])
            continue
        pointer = f"({parameter.type}*)buffers[{buffers}]"
        arguments.append(f"*{pointer}" if parameter.reference else pointer)
        buffers += 1
    return (
        '\nextern "C" __attribute__((no_sanitize("thread")))\n'
        "void msl_thread(void* const* buffers, const msl::Position& at) {\n"
        f"  (void)at;\n  {traced.instance}({', '.join(arguments)});\n}}\n"
    )


def _threadgroup_variables(text: str, function: str, keep: bool = False) -> str:
    """``keep`` leaves the variables in the program, with their address space."""
    kernel = text.index(f"void {function}(")
    out, done, count = [], 0, 0
    for match in re.finditer(r"\bthreadgroup\b", text):
        if match.start() < done or _inside_marker(text, match.start()):
            continue
        out.append(text[done : match.start()])
        done = match.end()
        line = _line(text, match.start())
        try:
            stop, end = _declaration_end(text, done)
        except ValueError as error:
            shown = " ".join(str(error).split())
            raise TranslationError(
                f"a threadgroup declaration that cannot be read (a comparison or a shift in the "
                f"arguments of a template needs parentheses): {shown}",
                line,
            ) from None
        if stop not in (",", ";", "="):
            if keep:
                out.append("threadgroup")
            continue  # a pointer, a reference, a cast: plain memory for g++
        if match.start() < kernel:
            raise TranslationError("threadgroup variables belong into the kernel function", line)
        declarators = _split(text[done : text.index(";", end)])
        done = text.index(";", end) + 1
        if keep:
            out.append(f"extern {text[match.start() : done]}")
        else:
            lines = text.count("\n", match.start(), done)
            out.append(_references(declarators, count, line) + "\n" * lines)
        count += len(declarators)
    return "".join(out) + text[done:]


def _references(declarators: list[str], number: int, line: int) -> str:
    base, out = "", []
    for i, declarator in enumerate(declarators):
        match = re.fullmatch(r"\s*(.*?)\b(\w+)\s*((?:\[.*\])?)\s*", declarator, re.DOTALL)
        if not match or any(char == "=" for _, char in _outside_brackets(declarator, 0)):
            raise TranslationError("a threadgroup variable cannot have an initial value", line)
        base = match[1] if i == 0 else base
        kind = f"msl_type_{number + i}"
        flat = f"std::remove_all_extents_t<{kind}>"
        out.append(
            f"using {kind} = {base}{match[3]}; {kind}& {match[2]} = *static_cast<{kind}*>("
            f'msl_threadgroup_array({number + i}, sizeof({kind}), sizeof({flat}), "{match[2]}"));'
        )
    return re.sub(r"\s*\n\s*", " ", " ".join(out))


def _outside_brackets(text: str, start: int) -> Iterator[tuple[int, str]]:
    """The characters from ``start`` on that lie in no bracket.

    In [] and () an angle bracket is a comparison or a shift; elsewhere in a declaration it belongs
    to the arguments of a template.

    Raises:
        ValueError: the text, or a statement in it, ends in angle brackets.
    """
    closing = {"[": "]", "(": ")", "<": ">"}
    awaited: list[str] = []
    for i in range(start, len(text)):
        char = text[i]
        in_template = not awaited or awaited[-1] == ">"
        if char in "[(" or (char == "<" and in_template):
            awaited.append(closing[char])
        elif awaited and char == awaited[-1]:
            awaited.pop()
        elif not awaited:
            yield i, char
        elif char == ";":
            break
    if awaited:
        raise ValueError(text[start:i])


def _declaration_end(text: str, position: int) -> tuple[str, int]:
    """The first character that tells what `threadgroup` begins, outside of brackets."""
    for i, char in _outside_brackets(text, position):
        if char in ";,=*&)>{":
            return char, i
    raise ValueError(text[position:])


def _split(declaration: str) -> list[str]:
    commas = [i for i, char in _outside_brackets(declaration, 0) if char == ","]
    starts = [0, *(i + 1 for i in commas)]
    return [declaration[i:j] for i, j in zip(starts, [*commas, None], strict=True)]


def _inside_marker(text: str, position: int) -> bool:
    start = text.rfind("\n", 0, position) + 1
    return text[start : start + 1] == "#"


def _line(text: str, position: int) -> int:
    """Line in the Metal text, by the preprocessor's last marker before ``position``."""
    line, start = 1, 0
    for marker in _MARKER.finditer(text, 0, position):
        line, start = int(marker[1]), marker.end()
    return line + text.count("\n", start, position)
