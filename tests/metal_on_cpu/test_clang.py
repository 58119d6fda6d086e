"""What clang finds in the text of a kernel that g++ lets pass."""

from __future__ import annotations

import mlx.core as mx
import pytest

from metal_on_cpu import clang_diagnostics, find_clang
from metal_on_cpu.example import BODY, matvec, problem

pytestmark = pytest.mark.skipif(not find_clang()[0], reason=find_clang()[1])


def check(source, header="", dtype=mx.float32) -> list[str]:
    kernel = mx.fast.metal_kernel(
        name="checked", input_names=["x"], output_names=["out"], source=source, header=header
    )
    return clang_diagnostics(
        kernel,
        inputs=[mx.zeros((64,), dtype=dtype)],
        grid=(64, 1, 1),
        threadgroup=(64, 1, 1),
        output_shapes=[(64,)],
        output_dtypes=[dtype],
    )


START = "uint i = thread_position_in_threadgroup.x; threadgroup float s[64];\n"


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_a_good_kernel_gives_no_message(dtype):
    call, _ = problem(37, 256, 32, dtype)
    assert clang_diagnostics(matvec(BODY), **call) == []


def test_much_of_the_language_gives_no_message():
    source = """
    threadgroup float* p = s + 1; threadgroup atomic_uint n;
    atomic_store_explicit(&n, 0u, memory_order_relaxed);
    const device float4* wide = (const device float4*)x;
    float4 v = wide[0] * 2.0f + float4(1.0f, 2.0f, float2(3.0f));
    p[0] = dot(v, v) + v.x + metal::precise::exp(max(v.y, 0.0f)) + first(x) + TABLE[1];
    threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
    uint bits = as_type<uint>(simd_shuffle_xor(s[i], 4)) & 0xffu;
    out[i] = select(simd_sum(float(bits)), float(half(s[i])), popcount(bits) > 3u);
    """
    header = "constant float TABLE[2] = {1, 2};\n"
    header += "template <typename P> METAL_FUNC float first(P all) { return float(all[0]); }\n"
    assert check(START + source, header) == []


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("threadgroup float* p = out; p[i] = x[i];", "threadgroup float *"),
        ("device float* p = s; p[i] = x[i];", "device float *"),
        ("const float* p = x; out[i] = p[i];", "const float *"),
        ("out[i] = first(x);", "no matching function"),
        ("uint u = i; out[i] = x[i] + max(u, 1);", "ambiguous"),
        ("float unset; out[i] = x[i] + unset;", "uninitialized"),
        ("int k = 3; out[i] = x[i] + (i < k);", "different signs"),
        ("s[i] = x[i]; auto f = [](auto a) { return a; }; out[i] = f(s[i]) + no_such;", "no_such"),
    ],
    ids=lambda text: text[:24],
)
def test_what_it_finds(source, message):
    header = "inline float first(const threadgroup float* values) { return values[0]; }\n"
    found = check(START + source, header)
    assert any(message in entry and source in entry for entry in found)


def test_a_constant_pointer_is_no_device_pointer():
    # MLX puts inputs of fewer than 8 elements into the constant address space.
    header = "inline float first(const device float* values) { return values[0]; }\n"
    kernel = mx.fast.metal_kernel(
        name="small",
        input_names=["x"],
        output_names=["out"],
        source="out[0] = first(x);",
        header=header,
    )
    call = {"grid": (1, 1, 1), "threadgroup": (1, 1, 1), "output_dtypes": [mx.float32]}
    call["output_shapes"] = [(1,)]
    assert clang_diagnostics(kernel, inputs=[mx.zeros((8,))], **call) == []
    assert "no matching function" in clang_diagnostics(kernel, inputs=[mx.zeros((7,))], **call)[0]
