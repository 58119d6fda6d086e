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
from turboquant_mlx.kernels.dialect import Kernel, stand_in
from turboquant_mlx.quant.spec import QuantSpec

GOLDEN = Path(__file__).parent / "golden"
KERNELS = [matvec.MATVEC, matvec.GATHER_MATVEC, *matvec.JOINT_MATVEC.values()]
KERNELS += [expand.EXPAND, rotate.ROTATE]
SPEC = QuantSpec(bits=3, window_bits=8, group_size=64, scale_layout="log8")

kernels = pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)


def a_call(kernel: Kernel, dialect, spec=SPEC, dtype=mx.float16, rows=1, width=192):
    """The inputs and the other arguments of a typical call."""
    calls: list[dict] = []

    def note(kernel, dialect):
        def call(**arguments):
            calls.append(arguments)
            shapes, dtypes = arguments["output_shapes"], arguments["output_dtypes"]
            return [mx.zeros(s, d) for s, d in zip(shapes, dtypes, strict=True)]

        return call

    with stand_in(note):
        if kernel is matvec.MATVEC:
            matvec.matvec(activation(rows, width, dtype=dtype), packed(spec, 70, width), dialect)
        elif kernel is matvec.GATHER_MATVEC:
            x, chosen = activation(1, width, dtype=dtype), mx.array([1, 0], mx.uint32)
            matvec.gather_matvec(x, packed(spec, 3, 70, width), chosen, dialect)
        elif kernel in matvec.JOINT_MATVEC.values():
            weights = [packed(spec, 70, width)] * (len(kernel.outputs))
            matvec.joint_matvec(activation(rows, width, dtype=dtype), weights, dialect)
        elif kernel is rotate.ROTATE:
            rotate.rotate_few(
                activation(1, width, dtype=dtype), 192, mx.ones(width, mx.float16), dialect
            )
        else:
            expand.expand(packed(spec, 70, width), dtype, dialect)
    (call,) = calls
    return call.pop("inputs"), call


@kernels
def test_the_metal_text_is_the_one_in_review(kernel):
    """MLX's own text of the kernel, kept so that a change shows; TQ_UPDATE_GOLDEN=1 renews it."""
    trace = pytest.importorskip("metal_on_cpu").trace
    inputs, call = a_call(kernel, "metal")
    text = trace(kernel.build("metal"), inputs, **call).text
    kept = GOLDEN / f"{kernel.name}.metal"
    if os.environ.get("TQ_UPDATE_GOLDEN"):
        GOLDEN.mkdir(exist_ok=True)
        kept.write_text(text)
    assert text == kept.read_text(), f"{kept.name} differs: look at it, then TQ_UPDATE_GOLDEN=1"


@kernels
def test_metal_text_has_nothing_of_cuda(kernel):
    text = kernel.header("metal") + kernel.source("metal")
    assert not re.search(
        r"\b__\w+|reinterpret_cast|\bthreadIdx|\bblockIdx|\basm\b|\bdouble\b", text
    )
    assert text.isascii()


@kernels
def test_cuda_text_has_nothing_of_metal(kernel):
    text = kernel.header("cuda") + kernel.source("cuda")
    assert not re.search(r"\bsimd_|\bthreadgroup|\bMLX_MTL|\bas_type\b|\bdouble\b", text)
    assert not re.search(r"\bthread_(position|index)_in", text)
    assert text.isascii()


@kernels
def test_bodies_follow_the_rules_of_the_dialects(kernel):
    assert not re.search(r"\breturn\b", kernel.body), "nobody returns before a barrier"
    for name in kernel.inputs:
        assert not re.search(rf"[&*]\s*{name}\b(?!_)", kernel.body), f"a pointer to {name}"
    names = re.findall(r"\bTQ_\w+", kernel.body)
    for dialect in ("metal", "cuda"):
        defined = set(re.findall(r"#define (TQ_\w+)", kernel.header(dialect) + kernel.body))
        assert set(names) <= defined


def test_a_kernel_is_built_once():
    assert matvec.MATVEC.build("metal") is matvec.MATVEC.build("metal")


def test_names_are_unique():
    """MLX keeps compiled kernels by name."""
    assert len({kernel.name for kernel in KERNELS}) == len(KERNELS)


def test_a_stand_in_is_undone():
    with stand_in(lambda kernel, dialect: pytest.fail("not to be called")):
        pass
    weight = packed(QuantSpec(bits=2, group_size=32), 2, 32)
    with running("metal" if not mx.cuda.is_available() else "cuda"):
        assert mx.isfinite(matvec.matvec(activation(1, 32), weight, _here())).all()


def _here():
    return "cuda" if mx.cuda.is_available() else "metal"


_CUDA_NAMES = {
    mx.float32: "float",
    mx.float16: "__half",
    mx.bfloat16: "__nv_bfloat16",
    mx.uint32: "unsigned int",
    mx.uint8: "unsigned char",
}


def cuda_program(kernel: Kernel, inputs: list[mx.array], call: dict) -> str:
    """The CUDA text of a kernel as MLX wraps it, as far as a compiler must see it."""
    source = kernel.source("cuda")
    parameters = []
    for name, array in zip(kernel.inputs, inputs, strict=True):
        parameters.append(f"const {_CUDA_NAMES[array.dtype]}* {name}")
        parameters += [f"const Dims {name}_shape"] * (f"{name}_shape" in source)
    for name, dtype in zip(kernel.outputs, call["output_dtypes"], strict=True):
        parameters.append(f"{_CUDA_NAMES[dtype]}* {name}")
    lines = []
    for name, value in call["template"]:
        if isinstance(value, bool | int):
            kind = "bool" if isinstance(value, bool) else "int"
            lines.append(f"constexpr {kind} {name} = {str(value).lower()};")
        else:
            lines.append(f"using {name} = {_CUDA_NAMES[value]};")
    return "\n".join(
        [
            "struct Dims { int at[10]; __device__ int operator[](int i) const { return at[i]; } };",
            kernel.header("cuda"),
            "namespace mlx::core::cu {",
            f'extern "C" __global__ void kernel({", ".join(parameters)}) {{',
            *lines,
            source,
            "}}",
        ]
    )


@pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc")
@kernels
@pytest.mark.parametrize(
    "spec, rows, dtype",
    [
        (SPEC, 1, mx.bfloat16),
        (QuantSpec(bits=3, group_size=64), 8, mx.float16),
        (QuantSpec(bits=7, group_size=8), 2, mx.float32),
    ],
    ids=str,
)
def test_cuda_text_compiles_without_spilling(kernel, spec, rows, dtype, tmp_path):
    program = tmp_path / "kernel.cu"
    program.write_text(cuda_program(kernel, *a_call(kernel, "cuda", spec, dtype, rows)))
    command = ["nvcc", "-arch=sm_90", "-std=c++17", "-cubin", "-Xptxas", "-v", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in done.stdout + done.stderr
