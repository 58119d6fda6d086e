"""The renderings of the cache's kernels: what they may hold, and that a change of them is seen."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import mlx.core as mx
import pytest

from kv_cases import random
from turboquant_mlx.kernels import kv_attend, kv_expand, kv_store
from turboquant_mlx.kernels.dialect import stand_in
from turboquant_mlx.kernels.dispatch import force_backend
from turboquant_mlx.kvcache.attend import attend
from turboquant_mlx.kvcache.spec import KVSpec
from turboquant_mlx.kvcache.store import PackedStore

GOLDEN = Path(__file__).parent / "golden"
KERNELS = [*kv_attend.ATTEND, kv_attend.ADD_UP, kv_store.STORE, kv_expand.EXPAND]
FOR_CUDA = [kv_attend.ATTEND[1]]
WORK = ["attend", "combine", "store", "expand"]


def calls(dialect, bits=(3, 4), width=128, repeats=4, length=1, dtype=mx.float16) -> dict:
    """By work: the kernel, its inputs and the other arguments, while a token is generated."""
    found: list[tuple] = []

    def note(kernel, dialect):
        def call(**arguments):
            found.append((kernel, arguments.pop("inputs"), arguments))
            shapes, dtypes = arguments["output_shapes"], arguments["output_dtypes"]
            return [mx.zeros(s, d) for s, d in zip(shapes, dtypes, strict=True)]

        return call

    store = PackedStore(KVSpec(*bits), [0])
    with stand_in(note), force_backend(dialect):
        store.append(*(random(1, 2, 40, width, dtype=dtype) for _ in range(2)))
        found.clear()
        store.append(*(random(1, 2, 1, width, dtype=dtype) for _ in range(2)))
        store.decoded(store.columns)
        attend(random(1, 2 * repeats, length, width, dtype=dtype), store, scale=0.1)
    return dict(zip(["store", "expand", "attend", "combine"], found, strict=True))


@pytest.mark.skipif(mx.cuda.is_available(), reason="MLX for CUDA generates no Metal text")
@pytest.mark.parametrize("work", WORK)
def test_the_metal_text_is_the_one_in_review(work):
    """MLX's own text of the kernel, kept so that a change shows; TQ_UPDATE_GOLDEN=1 renews it."""
    trace = pytest.importorskip("metal_on_cpu").trace
    kernel, inputs, call = calls("metal")[work]
    text = trace(kernel.build("metal"), inputs, **call).text
    kept = GOLDEN / f"turboquant_kv_{work}.metal"
    if os.environ.get("TQ_UPDATE_GOLDEN"):
        GOLDEN.mkdir(exist_ok=True)
        kept.write_text(text)
    assert text == kept.read_text(), f"{kept.name} differs: look at it, then TQ_UPDATE_GOLDEN=1"


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("bits, width", [((3, 4), 128), ((8, 5), 80)])
def test_address_spaces_are_told_apart(work, bits, width):
    metal_on_cpu = pytest.importorskip("metal_on_cpu")
    if why := metal_on_cpu.find_clang()[1]:
        pytest.skip(why)
    kernel, inputs, call = calls("metal", bits, width, dtype=mx.bfloat16)[work]
    found = metal_on_cpu.clang_diagnostics(kernel.build("metal"), inputs=inputs, **call)
    assert [line for line in found if "unused" not in line] == []


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_texts_keep_to_their_dialect(kernel):
    if kernel not in FOR_CUDA:
        text = kernel.header("metal") + kernel.source("metal")
        assert not re.search(r"\b__\w+|reinterpret_cast|\b(threadIdx|blockIdx|asm|double)\b", text)
        assert text.isascii()
    text = kernel.header("cuda") + kernel.source("cuda")
    assert not re.search(r"\bsimd_|\bthreadgroup|\bMLX_MTL|\bas_type\b|\bdouble\b", text)
    assert not re.search(r"\bthread_(position|index)_in", text)
    assert text.isascii()
    assert not re.search(r"\breturn\b", kernel.body), "nobody returns before a barrier"
    for name in kernel.inputs:
        assert not re.search(rf"&\s*{name}\b(?!_)", kernel.body), f"a pointer to {name}"


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_every_macro_is_defined(kernel):
    names = set(re.findall(r"\bTQ_\w+", kernel.body))
    for dialect in ("cuda",) if kernel in FOR_CUDA else ("metal", "cuda"):
        defined = set(re.findall(r"#define (TQ_\w+)", kernel.header(dialect) + kernel.body))
        assert names <= defined


def test_a_list_of_template_arguments_makes_one_kernel():
    """MLX keeps compiled kernels by name."""
    one, two = calls("metal"), calls("metal")
    other = calls("metal", bits=(4, 4))
    for work in WORK:
        assert one[work][0] is two[work][0]
    assert one["attend"][0].name != other["attend"][0].name
    assert one["store"][0].name != other["store"][0].name


_CUDA_NAMES = {
    mx.float32: "float",
    mx.float16: "__half",
    mx.bfloat16: "__nv_bfloat16",
    mx.uint32: "unsigned int",
    mx.int32: "int",
    mx.uint8: "unsigned char",
}


def cuda_program(kernel, inputs: list[mx.array], call: dict) -> str:
    """The CUDA text of a kernel as MLX wraps it, as far as a compiler must see it."""
    source = kernel.source("cuda")
    parameters = []
    for name, array in zip(kernel.inputs, inputs, strict=True):
        parameters.append(f"const {_CUDA_NAMES[array.dtype]}* {name}")
        parameters += [f"const Dims {name}_shape"] * (f"{name}_shape" in source)
    for name, dtype in zip(kernel.outputs, call["output_dtypes"], strict=True):
        parameters.append(f"{_CUDA_NAMES[dtype]}* {name}")
    return "\n".join(
        [
            "struct Dims { int at[10]; __device__ int operator[](int i) const { return at[i]; } };",
            kernel.header("cuda"),
            f'extern "C" __global__ void kernel({", ".join(parameters)}) {{ {source} }}',
        ]
    )


@pytest.mark.heavy
@pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc")
@pytest.mark.parametrize(
    "bits, width, queries, dtype",
    [
        ((3, 4), 128, (4, 1), mx.float16),
        pytest.param((4, 4), 128, (4, 4), mx.bfloat16, marks=pytest.mark.heavy),
        pytest.param((8, 5), 80, (1, 1), mx.float16, marks=pytest.mark.heavy),
        pytest.param((3, 4), 256, (8, 1), mx.bfloat16, marks=pytest.mark.heavy),
        pytest.param((3, 4), 576, (8, 2), mx.float32, marks=pytest.mark.heavy),
    ],
    ids=str,
)
def test_cuda_text_compiles_without_spilling(bits, width, queries, dtype, tmp_path):
    for work, (kernel, inputs, call) in calls("cuda", bits, width, *queries, dtype).items():
        program = tmp_path / f"{work}.cu"
        program.write_text(cuda_program(kernel, inputs, call))
        command = ["nvcc", "-arch=sm_90", "-std=c++17", "-cubin", "-Xptxas", "-v", str(program)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "0 bytes spill stores, 0 bytes spill loads" in done.stdout + done.stderr
