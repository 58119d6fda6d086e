"""What a call can say about a kernel: templates, shapes, strides, grids, initial values."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from metal_on_cpu import missing_compiler, on_cpu, run, trace

pytestmark = pytest.mark.skipif(bool(missing_compiler()), reason=missing_compiler())

DTYPES = [mx.float32, mx.float16, mx.bfloat16, mx.bool_]
DTYPES += [mx.int8, mx.uint8, mx.int16, mx.uint16, mx.int32, mx.uint32, mx.int64, mx.uint64]


def make(source, inputs=("x",), outputs=("out",), **more):
    return mx.fast.metal_kernel(
        name="called", input_names=list(inputs), output_names=list(outputs), source=source, **more
    )


def one_output(size, dtype=mx.float32, threads=None, group=32, **more):
    call = {"output_shapes": [(size,)], "output_dtypes": [dtype]}
    return {**call, "grid": (threads or size, 1, 1), "threadgroup": (group, 1, 1), **more}


def test_the_text_is_what_mlx_generates():
    kernel = make("out[thread_position_in_grid.x] = T(x[0]) + N;", header="// a header\n")
    call = one_output(8, template=[("T", mx.bfloat16), ("N", -3), ("B", True)])
    traced = trace(kernel, [mx.zeros((9,))], **call)
    assert traced.text.startswith(
        "// a header\ntemplate <typename T, int N, bool B>\n[[kernel]] void"
    )
    assert traced.instance == f"{traced.function}<bfloat16_t, -3, 1>"
    assert [p.name for p in traced.parameters] == ["x", "out", "thread_position_in_grid"]
    assert traced.parameters[0].type == "const device float"


def test_mlx_itself_checks_the_arguments():
    with pytest.raises(ValueError, match="output_shapes"):
        run(
            make("out[0] = x[0];"),
            inputs=[mx.zeros((8,))],
            **{**one_output(8), "output_shapes": []},
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_goes_in_and_comes_out(dtype):
    values = mx.array([0, 1, 2, 3, 100, 0, 7, 1]).astype(dtype)
    kernel = make("uint i = thread_position_in_grid.x; out[i] = x[7 - i];")
    (out,) = on_cpu(kernel)(inputs=[values], **one_output(8, dtype))
    assert out.dtype == dtype
    assert mx.array_equal(out, values[::-1])


def test_template_arguments():
    kernel = make("if (B) out[thread_position_in_grid.x] = T(T(x[0]) / T(3)) * N;")
    call = one_output(8, template=[("T", mx.float16), ("N", -2), ("B", True)])
    (out,) = run(kernel, inputs=[mx.ones((8,))], **call)
    assert out[0] == -2 * np.float16(1 / 3)


def test_numbers_zero_dimensional_and_small_inputs():
    kernel = make("out[thread_position_in_grid.x] = a + b + c[1];", ["a", "b", "c"])
    (out,) = run(kernel, inputs=[1.5, mx.array(2), mx.array([3, 4])], **one_output(8))
    assert out[0] == 7.5


def test_shape_strides_and_dimensions_of_a_contiguous_input():
    source = """
    out[0] = x_shape[0]; out[1] = x_shape[1];
    out[2] = x_strides[0]; out[3] = x_strides[1];
    out[4] = x_ndim + x[0];
    """
    (out,) = run(make(source), inputs=[mx.zeros((3, 5)).T], **one_output(5, threads=1))
    np.testing.assert_array_equal(out, [5, 3, 3, 1, 2])


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize(
    "view",
    [lambda a: a.T, lambda a: a[::-1, ::2], lambda a: mx.broadcast_to(a[1], (4, 6)), lambda a: a],
    ids=["transposed", "backwards", "broadcast", "plain"],
)
def test_an_input_with_strides_is_passed_as_it_is_if_the_kernel_wants_that(view, dtype):
    x = view(mx.arange(24).reshape(4, 6).astype(dtype))
    source = """
    int64_t i = thread_position_in_grid.x;
    out[i] = x[elem_to_loc(i, x_shape, x_strides, x_ndim)];
    """
    strided = make(source, ensure_row_contiguous=False)
    (out,) = run(strided, inputs=[x], **one_output(x.size))
    np.testing.assert_array_equal(out, np.array(x.astype(mx.float32)).reshape(-1))


def test_an_input_that_is_named_like_a_shape():
    kernel = make("out[thread_position_in_grid.x] = x + x_shape[1];", ["x", "x_shape"])
    (out,) = run(kernel, inputs=[mx.array(0.0), mx.array([5, 6, 7])], **one_output(8))
    assert out[0] == 6


@pytest.mark.parametrize("value", [0, -1.5, 7])
def test_an_initial_value_fills_the_outputs(value):
    kernel = make("if (thread_position_in_grid.x == 1) out[1] = x[0];")
    (out,) = run(kernel, inputs=[mx.array([3.0])], init_value=value, **one_output(8))
    np.testing.assert_array_equal(out, [value, 3] + [value] * 6)


def test_several_outputs_of_several_shapes():
    kernel = make("out[thread_position_in_grid.x] = x[0]; n[0] = 5;", outputs=["out", "n"])
    call = {"output_shapes": [(1, 1), ()], "output_dtypes": [mx.float16, mx.int32]}
    out, n = run(kernel, inputs=[mx.array([3.0])], grid=(1, 1, 1), threadgroup=(1, 1, 1), **call)
    assert out.shape == (1, 1)
    assert n.shape == ()
    assert n == 5


def test_atomic_outputs():
    source = "uint i = thread_position_in_grid.x % 3;"
    source += "atomic_fetch_add_explicit(&out[i], x[0], memory_order_relaxed);"
    kernel = make(source, atomic_outputs=True)
    (out,) = run(kernel, inputs=[mx.array([0.5])], init_value=0, **one_output(3, threads=90))
    np.testing.assert_array_equal(out, [15, 15, 15])


def test_where_each_thread_stands_in_a_grid_with_smaller_groups_at_its_edges():
    source = """
    uint3 p = thread_position_in_grid, n = threads_per_grid;
    uint at = (p.z * n.y + p.y) * n.x + p.x;
    uint3 t = thread_position_in_threadgroup, g = threadgroup_position_in_grid;
    uint3 s = threads_per_threadgroup, groups = threadgroups_per_grid;
    uint3 whole = dispatch_threads_per_threadgroup;
    bool good = x[0] == 0 && thread_index_in_threadgroup == (t.z * s.y + t.y) * s.x + t.x
        && p.x == g.x * whole.x + t.x && p.y == g.y * whole.y + t.y && p.z == g.z * whole.z + t.z
        && thread_index_in_simdgroup == thread_index_in_threadgroup % threads_per_simdgroup
        && simdgroup_index_in_threadgroup == thread_index_in_threadgroup / 32
        && simdgroups_per_threadgroup == (s.x * s.y * s.z + 31) / 32
        && groups.x == 3 && groups.y == 2 && groups.z == 2;
    out[at] = good ? int(s.x * 100 + s.y * 10 + s.z) : -1;
    """
    call = {"output_shapes": [(3, 7, 20)], "output_dtypes": [mx.int32]}
    (out,) = run(
        make(source), inputs=[mx.array([0])], grid=(20, 7, 3), threadgroup=(8, 4, 2), **call
    )
    assert out.min() > 0
    assert (out[0, 0, 0], out[2, 6, 19]) == (842, 431)


def test_a_threadgroup_larger_than_the_grid_shrinks_to_it():
    kernel = make("out[thread_position_in_grid.x] = threads_per_threadgroup.x + x[0];")
    (out,) = run(kernel, inputs=[mx.array([0])], **one_output(5, group=64))
    assert out[0] == 5


@pytest.mark.parametrize("group", [0, 2048])
def test_a_threadgroup_of_a_size_that_no_gpu_takes(group):
    with pytest.raises(ValueError, match="threadgroup"):
        run(make("out[0] = x[0];"), inputs=[mx.array([0])], **one_output(4096, group=group))


def test_arrays_without_elements():
    kernel = make("out[thread_position_in_grid.x] = x_shape[0];")
    (out,) = run(kernel, inputs=[mx.zeros((0, 4))], **one_output(8))
    assert out[0] == 0


def test_a_kernel_can_be_replaced_by_its_twin_on_the_cpu():
    kernel = on_cpu(make("uint i = thread_position_in_grid.x; out[i] = x[i] * 2;"))
    (out,) = kernel(inputs=[mx.arange(8)], stream=mx.gpu, **one_output(8, mx.int32))
    assert out.tolist() == [0, 2, 4, 6, 8, 10, 12, 14]


def test_the_example_in_the_documentation():
    page = Path(__file__).parents[2] / "docs" / "concepts" / "metal-on-cpu.md"
    names: dict = {}
    exec(page.read_text().split("```python")[1].split("```")[0], names)
    np.testing.assert_array_equal(names["out"], np.arange(64)[::-1])


def test_a_kernel_runs_the_same_way_each_time():
    source = "uint i = thread_position_in_grid.x; out[i] = simd_sum(metal::exp(x[i]));"
    x = mx.random.normal((256,), key=mx.random.key(0))
    first, second = (run(make(source), inputs=[x], **one_output(256))[0] for _ in range(2))
    np.testing.assert_array_equal(first, second)
