"""Every kernel's two renderings: what they may hold, and that a change of them is seen."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import mlx.core as mx
import pytest

from kernel_cases import activation, packed, running
from turboquant_mlx.kernels import expand, matvec, rotate
from turboquant_mlx.kernels.dialect import Kernel, compact, stand_in
from turboquant_mlx.quant.spec import QuantSpec

GOLDEN = Path(__file__).parent / "golden"
SPEC = QuantSpec(bits=3, window_bits=8, group_size=64, scale_layout="log8")
TERNARY = QuantSpec(code="ternary", group_size=64)
WORK = ["matvec", "gather", "joint2", "joint3", "joint gather", "expand", "rotate", "rotate many"]
KINDS = [
    matvec.MATVEC,
    matvec.GATHER_MATVEC,
    *matvec.JOINT_MATVEC.values(),
    matvec.JOINT_GATHER,
]
FOR_BOTH = [kernel for kind in KINDS for kernel in (kind.multiply, kind.ternary)]
FOR_BOTH += [expand.EXPAND, expand.EXPAND_TERNARY, rotate.ROTATE, rotate.ROTATE_WARPS]
FOR_CUDA = [*FOR_BOTH, *(kernel for kind in KINDS for kernel in (kind.tensor, kind.tensor_rows))]


def name_of(kernel: Kernel) -> str:
    return kernel.name


def a_call(work: str, dialect, spec=SPEC, dtype=mx.float16, rows=1):
    """The kernel, the inputs and the other arguments of a typical call."""
    calls: list[tuple] = []

    def note(kernel, dialect):
        def call(**arguments):
            calls.append((kernel, arguments.pop("inputs"), arguments))
            shapes, dtypes = arguments["output_shapes"], arguments["output_dtypes"]
            return [mx.zeros(s, d) for s, d in zip(shapes, dtypes, strict=True)]

        return call

    weight, x = packed(spec, 600, 192), activation(rows, 192, dtype=dtype)
    with stand_in(note):
        if work == "matvec":
            matvec.matvec(x, weight, dialect)
        elif work == "gather":
            chosen = mx.array([1, 0], mx.uint32)
            matvec.gather_matvec(x[:1], packed(spec, 2, 600, 192), chosen, dialect)
        elif work == "joint gather":
            stacks = [packed(spec, 2, 600, 192)] * 2
            matvec.joint_gather(x[:1], stacks, mx.array([1, 0], mx.uint32), dialect)
        elif work.startswith("joint"):
            matvec.joint_matvec(x, [weight] * int(work[-1]), dialect)
        elif work == "rotate":
            rotate.rotate_few(x, 192, mx.ones(192, mx.float16), dialect)
        elif work == "rotate many":
            x = activation(64, 1536, dtype=dtype)
            rotate.rotate_many(x, 768, mx.ones(1536, mx.float16), dialect)
        else:
            expand.expand(weight, dtype, dialect)
    return calls[0]


@pytest.mark.skipif(mx.cuda.is_available(), reason="MLX for CUDA generates no Metal text")
@pytest.mark.parametrize("spec", [SPEC, TERNARY], ids=["stream", "ternary"])
@pytest.mark.parametrize("work", WORK)
def test_the_metal_text_is_the_one_in_review(work, spec):
    """MLX's own text of the kernel, kept so that a change shows; TQ_UPDATE_GOLDEN=1 renews it."""
    trace = pytest.importorskip("metal_on_cpu").trace
    kernel, inputs, call = a_call(work, "metal", spec)
    text = trace(kernel.build("metal"), inputs, **call).text
    kept = GOLDEN / f"{kernel.family}.metal"
    if os.environ.get("TQ_UPDATE_GOLDEN"):
        GOLDEN.mkdir(exist_ok=True)
        kept.write_text(text)
    assert text == kept.read_text(), f"{kept.name} differs: look at it, then TQ_UPDATE_GOLDEN=1"


@pytest.mark.skipif(mx.cuda.is_available(), reason="MLX for CUDA generates no Metal text")
@pytest.mark.parametrize("spec", [SPEC, TERNARY], ids=["stream", "ternary"])
@pytest.mark.parametrize("work", WORK)
def test_address_spaces_are_told_apart(work, spec):
    metal_on_cpu = pytest.importorskip("metal_on_cpu")
    if why := metal_on_cpu.find_clang()[1]:
        pytest.skip(why)
    kernel, inputs, call = a_call(work, "metal", spec, dtype=mx.bfloat16)
    found = metal_on_cpu.clang_diagnostics(kernel.build("metal"), inputs=inputs, **call)
    assert [line for line in found if "unused" not in line] == []


def test_the_matrix_units_are_used_on_cuda_alone():
    for dialect in ("metal", "cuda"):
        for dtype in (mx.float16, mx.bfloat16, mx.float32):
            kernel, _, _ = a_call("matvec", dialect, dtype=dtype)
            expected = dialect == "cuda" and dtype != mx.float32
            assert (kernel.family == matvec.MATVEC.tensor.name) == expected


@pytest.mark.parametrize("kernel", FOR_BOTH, ids=name_of)
def test_metal_text_has_nothing_of_cuda(kernel):
    text = kernel.header("metal") + kernel.source("metal")
    assert not re.search(r"\b__\w+|reinterpret_cast|\b(threadIdx|blockIdx|asm|double)\b", text)
    assert text.isascii()


@pytest.mark.parametrize("kernel", FOR_CUDA, ids=name_of)
def test_cuda_text_has_nothing_of_metal(kernel):
    text = kernel.header("cuda") + kernel.source("cuda")
    assert not re.search(r"\bsimd_|\bthreadgroup|\bMLX_MTL|\bas_type\b|\bdouble\b", text)
    assert not re.search(r"\bthread_(position|index)_in", text)
    assert text.isascii()


@pytest.mark.parametrize("kernel", FOR_CUDA, ids=name_of)
def test_bodies_follow_the_rules_of_the_dialects(kernel):
    assert not re.search(r"\breturn\b", kernel.body), "nobody returns before a barrier"
    for name in kernel.inputs:
        assert not re.search(rf"[&*]\s*{name}\b(?!_)", kernel.body), f"a pointer to {name}"
    names = re.findall(r"\bTQ_\w+", kernel.body)
    for dialect in ("metal", "cuda") if kernel in FOR_BOTH else ("cuda",):
        defined = set(re.findall(r"#define (TQ_\w+)", kernel.header(dialect) + kernel.body))
        assert set(names) <= defined


def test_a_kernel_is_built_once():
    kernel, dialect = matvec.MATVEC.multiply, "cuda" if mx.cuda.is_available() else "metal"
    assert kernel.build(dialect) is kernel.build(dialect)
    template = [("T", mx.float16), ("BITS", 3), ("LOG8", True)]
    special = kernel.specialised(template)
    assert special is kernel.specialised(template)
    assert kernel.specialised([]) is kernel
    assert special.name != kernel.specialised([("T", mx.float16), ("BITS", 4)]).name
    assert special.family == kernel.name
    lines = "  using T = float16_t;\n  constexpr int BITS = 3;\n  constexpr bool LOG8 = true;\n"
    assert special.source("metal") == lines + kernel.source("metal")


def test_cuda_gets_no_more_text_than_it_needs(monkeypatch):
    """MLX goes through the text at each call and each evaluation."""
    built = {}
    monkeypatch.setattr(mx.fast, "cuda_kernel", lambda **text: built.update(text), raising=False)
    kernel = Kernel("some", ("x",), ("y",), "\n\n  // a reason\n  TQ_SYNC();  // another\n")
    kernel.build("cuda")
    header, source = (_included(built[part]) for part in ("header", "source"))
    assert source.endswith("\nTQ_SYNC();\n")
    assert "tq_read" not in header
    assert "#define TQ_SYNC() __syncthreads()\n" in header
    assert not re.search("//|^ |\n\n| $", header + source, re.MULTILINE)


def _included(text: str) -> str:
    (path,) = re.findall(r'#include "(.*)"', text)
    return Path(path).read_text()


def test_names_are_unique():
    """MLX keeps compiled kernels by name."""
    assert len({kernel.name for kernel in FOR_CUDA}) == len(FOR_CUDA) == 24


def test_a_stand_in_is_undone():
    with stand_in(lambda kernel, dialect: pytest.fail("not to be called")):
        pass
    weight = packed(QuantSpec(bits=2, group_size=32), 2, 32)
    here = "cuda" if mx.cuda.is_available() else "metal"
    with running(here):
        assert mx.isfinite(matvec.matvec(activation(1, 32), weight, here)).all()


_CUDA_NAMES = {
    mx.float32: "float",
    mx.float16: "__half",
    mx.bfloat16: "__nv_bfloat16",
    mx.uint32: "unsigned int",
    mx.uint8: "unsigned char",
}


def cuda_program(kernel: Kernel, inputs: list[mx.array], call: dict) -> str:
    """The CUDA text of a kernel as MLX wraps it, as far as a compiler must see it."""
    source = compact(kernel.source("cuda"))
    parameters = []
    for name, array in zip(kernel.inputs, inputs, strict=True):
        parameters.append(f"const {_CUDA_NAMES[array.dtype]}* {name}")
        parameters += [f"const Dims {name}_shape"] * (f"{name}_shape" in source)
    for name, dtype in zip(kernel.outputs, call["output_dtypes"], strict=True):
        parameters.append(f"{_CUDA_NAMES[dtype]}* {name}")
    return "\n".join(
        [
            "struct Dims { int at[10]; __device__ int operator[](int i) const { return at[i]; } };",
            compact(kernel.header("cuda")),
            "namespace mlx::core::cu {",
            f'extern "C" __global__ void kernel({", ".join(parameters)}) {{',
            source,
            "}}",
        ]
    )


def to_compile() -> list[tuple]:
    """Each kernel in each way that it may be compiled, each number of registers at its most."""
    scalar = QuantSpec(bits=3, group_size=64)
    cases = [(work, SPEC, 1, mx.bfloat16) for work in WORK]
    cases += [(work, TERNARY, 1, mx.float16) for work in WORK if "rotate" not in work]
    cases += [("matvec", spec, 8, mx.float16) for spec in (SPEC, scalar, TERNARY)]
    cases += [("joint3", spec, 8, mx.float32) for spec in (SPEC, scalar, TERNARY)]
    cases += [(work, SPEC, 1, mx.float32) for work in ("rotate", "rotate many")]
    for spec in (QuantSpec(bits=7, group_size=8), QuantSpec(bits=3, window_bits=12)):
        cases += [(work, spec, 2, mx.float32) for work in ("matvec", "gather", "expand")]
    return cases


@pytest.mark.heavy
@pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc")
@pytest.mark.parametrize("work, spec, rows, dtype", to_compile(), ids=str)
def test_cuda_text_compiles_without_spilling(work, spec, rows, dtype, tmp_path):
    program = tmp_path / "kernel.cu"
    program.write_text(cuda_program(*a_call(work, "cuda", spec, dtype, rows)))
    command = ["nvcc", "-arch=sm_90", "-std=c++17", "-cubin", "-Xptxas", "-v", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in done.stdout + done.stderr
