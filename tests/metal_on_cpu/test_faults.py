"""Each thing that the harness finds, planted in a small kernel, beside one done right."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from metal_on_cpu import CompileError, KernelFault, missing_compiler, run

pytestmark = pytest.mark.skipif(bool(missing_compiler()), reason=missing_compiler())


def go(source, x=None, *, threads=64, group=64, size=64, dtype=mx.float32, header="", **more):
    """Run ``source`` on one input `x` and one output `out` of ``size`` elements.

    `i` and `g` are the thread's places in its group and in the grid.
    """
    source = (
        "const int i = thread_position_in_threadgroup.x, g = thread_position_in_grid.x;\n" + source
    )
    kernel = mx.fast.metal_kernel(
        name="planted", input_names=["x"], output_names=["out"], source=source, header=header
    )
    return run(
        kernel,
        inputs=[mx.arange(64).astype(mx.float32) if x is None else x],
        grid=(threads, 1, 1),
        threadgroup=(group, 1, 1),
        output_shapes=[(size,)],
        output_dtypes=[dtype],
        **more,
    )[0]


def fault(source, *args, **more) -> KernelFault:
    with pytest.raises(KernelFault) as caught:
        go(source, *args, **more)
    return caught.value


START = "threadgroup float s[64]; "
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);\n"


# Barriers


def test_a_kernel_without_fault_runs():
    out = go(f"{START} s[i] = x[i];\n{BARRIER} out[i] = s[63 - i];")
    np.testing.assert_array_equal(out, np.arange(64)[::-1])


def test_a_barrier_that_some_threads_never_reach():
    found = fault(f"{START} s[i] = x[i]; out[i] = 0.0f; if (i >= 40) return;\n{BARRIER}")
    assert found.kind == "barrier"
    assert "threads 0-39 of the group; threads 40-63 have ended" in str(found)
    assert "threadgroup_barrier(mem_flags::mem_threadgroup);" in str(found)


def test_two_different_barriers():
    found = fault(f"{START} if (i < 32)\n{BARRIER} else\n{BARRIER} out[i] = x[i];")
    assert found.kind == "barrier"
    assert len(set(found.lines)) == 2


def test_two_barriers_of_one_line_are_told_apart():
    one = "threadgroup_barrier(mem_flags::mem_none)"
    found = fault(f"{START} if (i < 32) {one}; else {one}; out[i] = x[i];")
    assert found.kind == "barrier"


def test_a_barrier_in_a_loop_with_too_few_turns_for_some():
    found = fault(f"{START} out[i] = x[i]; for (uint k = 0; k < 1 + i / 32; ++k)\n{BARRIER}")
    assert found.kind == "barrier"


# Simd operations


def test_lanes_at_different_simd_operations():
    found = fault("float v = x[i];\nif (i % 2) v = simd_sum(v);\nelse v = simd_max(v); out[i] = v;")
    assert found.kind == "simd"
    assert "simd_sum" in str(found)
    assert "simd_max" in str(found)


def test_lanes_that_wait_at_a_barrier_while_others_wait_for_them():
    found = fault(f"{START} if (i % 2)\n{BARRIER} else\n out[i] = simd_sum(x[i]);")
    assert found.kind == "simd"


def test_lanes_that_have_ended():
    source = "out[i] = 1.0f; if (i >= 40) return; out[i] = simd_sum(x[i]);"
    found = fault(source)
    assert found.kind == "exited-lanes"
    assert "lanes 0-7 of simdgroup 1; lanes 8-31 have ended" in str(found)
    assert go(source, allow=["exited-lanes"])[39] == sum(range(32, 40))


def test_a_simdgroup_that_was_never_full_is_no_fault():
    out = go(
        "out[i] = simd_sum(x[i]);",
        threads=40,
        group=40,
        size=40,
    )
    assert out[39] == sum(range(32, 40))


def test_a_shuffle_from_a_lane_that_does_not_exist():
    found = fault(
        "out[i] = simd_shuffle_xor(x[i], 16);",
        threads=40,
        group=40,
        size=40,
    )
    assert found.kind == "absent-lane"


def test_a_broadcast_from_a_lane_that_the_lanes_do_not_agree_on():
    found = fault(
        "out[i] = simd_broadcast(x[i], ushort(i / 16));",
        threads=32,
        group=32,
        size=32,
    )
    assert found.kind == "lane-argument"


# Bounds


@pytest.mark.parametrize(
    ("index", "where"), [("64", "[64]"), ("-1", "[-1]"), ("100000", "[100000]"), ("-9", "[-9]")]
)
def test_a_read_outside_of_a_buffer(index, where):
    found = fault(f"out[i] = x[i == 5 ? {index} : i];")
    assert found.kind == "bounds"
    assert f"reads 4 bytes at `x`{where}, which has 64 elements" in str(found)
    assert "thread 5 of group 0" in str(found)


@pytest.mark.parametrize("index", [64, -1])
def test_a_write_outside_of_a_buffer(index):
    found = fault(f"out[i] = x[i];\nif (i == 0) out[{index}] = 1.0f;")
    assert found.kind == "bounds"
    assert "writes 4 bytes at `out`" in str(found)


def test_a_wide_read_that_ends_outside():
    found = fault("out[i] = ((const device float4*)(x + i))->w;")
    assert found.kind == "bounds"
    assert "`x`[64]" in str(found)


def test_a_read_outside_of_a_shape():
    assert fault("out[g] = x_shape[1];").kind == "bounds"


@pytest.mark.parametrize("pointer", ["s", "(s + 0 * i)"], ids=["array", "pointer"])
@pytest.mark.parametrize("index", ["i + 1", "i - 1"])
def test_an_access_outside_of_a_threadgroup_array(pointer, index):
    found = fault(f"{START} threadgroup float* p = {pointer}; p[{index}] = x[i]; out[i] = x[i];")
    assert found.kind == "bounds"
    assert "`s`[" in str(found)


def test_an_index_outside_of_a_threadgroup_array_of_known_size():
    assert fault(f"{START} s[i + 1] = x[i]; out[i] = x[i];").kind in ("index", "bounds")


def test_an_index_outside_of_a_local_array():
    found = fault("float a[4] = {1, 2, 3, 4}; out[i] = a[i] + x[i];")
    assert found.kind == "index"
    assert "element 4 of an array of type 'float [4]'" in str(found)


def test_a_pointer_to_nowhere():
    found = fault("const device float* p = nullptr; out[i] = p[x_shape[0]];")
    assert found.kind == "bounds"


def test_a_write_to_an_input():
    found = fault("((device float*)x)[i] = 1.0f; out[i] = 1.0f;")
    assert found.kind == "read-only"


def test_a_write_to_a_table_of_the_header():
    header = "constant float table[2] = {1, 2};\n"
    source = "out[i] = table[i % 2]; if (i == 9) table[i % 2] = x[i];"
    assert fault(source, header=header).kind == "read-only"


# Memory that nobody has written


def test_a_read_of_threadgroup_memory_before_anybody_wrote_it():
    found = fault(f"{START} if (i != 7) s[i] = x[i];\n{BARRIER} out[i] = s[63 - i];")
    assert found.kind == "uninitialised"
    assert "`s`[7]" in str(found)


def test_threadgroup_memory_is_fresh_for_each_group():
    source = f"{START} if (g < 64) s[i] = x[i];\n{BARRIER} out[g] = s[63 - i];"
    found = fault(source, threads=128, size=128)
    assert found.kind == "uninitialised"
    assert "group 1" in str(found)


def test_a_read_of_an_output_before_anybody_wrote_it():
    source = "out[i] += x[i];"
    assert fault(source).kind == "uninitialised"
    np.testing.assert_array_equal(go(source, init_value=2), np.arange(64) + 2)


def test_an_output_that_is_not_written_throughout():
    source = "if (i != 3) out[i] = x[i];"
    found = fault(source)
    assert found.kind == "unwritten"
    assert "`out`[3]" in str(found)
    assert go(source, allow=["unwritten"])[4] == 4
    assert go(source, init_value=0)[3] == 0


# Races


def test_a_read_of_what_another_thread_wrote_without_a_barrier():
    found = fault(f"{START} s[i] = x[i];\nout[i] = s[63 - i];")
    assert found.kind in ("race", "uninitialised")
    found = fault(f"{START} s[i] = 0;\n{BARRIER} s[i] = x[i];\nout[i] = s[i / 2 * 2];")
    assert found.kind == "race"
    assert "thread 0 wrote" in str(found)


def test_two_writers_of_one_word():
    found = fault(f"{START} s[i / 2] = 1.0f; out[i] = x[i];")
    assert found.kind == "race"
    assert "thread 0 wrote" in str(found)
    assert "thread 1 of group" in str(found)


def test_a_write_over_what_others_may_still_read():
    found = fault(f"{START} s[i] = x[i];\n{BARRIER} out[i] = s[63 - i];\ns[i] = 2.0f;")
    assert found.kind == "race"
    assert "s[i] = 2.0f;" in str(found)


def test_the_order_in_which_threads_happen_to_run_does_not_hide_a_race():
    # Thread 63 runs last here, and still may not read what thread 0 wrote.
    found = fault(f"{START} if (i == 0) s[0] = 1.0f;\nout[i] = 0.0f; if (i == 63) out[i] = s[0];")
    assert found.kind == "race"


def test_a_barrier_that_does_not_order_threadgroup_memory():
    source = (
        f"{START} s[i] = x[i];\nthreadgroup_barrier(mem_flags::mem_device); out[i] = s[63 - i];"
    )
    assert fault(source).kind == "race"


def test_a_simdgroup_barrier_orders_the_lanes_of_its_simdgroup_only():
    start = f"{START} s[i] = x[i]; simdgroup_barrier(mem_flags::mem_threadgroup);\n"
    assert go(f"{start} out[i] = s[i ^ 31];")[0] == 31
    assert fault(f"{start} out[i] = s[i ^ 32];").kind in ("race", "uninitialised")


def test_a_simd_operation_does_not_order_memory():
    source = f"{START} s[i] = x[i]; float t = simd_sum(x[i]);\nout[i] = s[i ^ 1] + t;"
    assert fault(source).kind == "race"


def test_small_types_that_share_a_word_do_not_race():
    source = f"threadgroup uchar s[64]; s[i] = uchar(i);\n{BARRIER} out[i] = s[63 - i] + x[0];"
    assert go(source)[0] == 63


def test_two_threads_that_write_one_element_of_an_output():
    found = fault("out[i / 2] = x[i];", size=32)
    assert found.kind == "race"


def test_two_groups_that_write_one_element_of_an_output():
    found = fault("out[i] = x[i];", threads=128)
    assert found.kind == "race"
    assert "another group" in str(found)


def test_a_plain_access_beside_atomic_ones():
    start = f"{START} threadgroup atomic_uint n;\n"
    start += "if (i == 0) atomic_store_explicit(&n, 0, memory_order_relaxed);\n"
    add = "atomic_fetch_add_explicit(&n, 1u, memory_order_relaxed);\n"
    read = "out[i] = x[0] + *(threadgroup uint*)&n;"
    assert go(f"{start}{BARRIER}{add}{BARRIER}{read}")[5] == 64
    assert fault(f"{start}{BARRIER}{add}{read}").kind == "race"


# The rest


def test_a_shift_by_the_width_of_the_type():
    found = fault("out[i] = (1u << (32 - i % 32)) + x[i];")
    assert found.kind == "shift"
    assert "a number of 32 bits by 32" in str(found)


def test_a_division_by_zero():
    assert fault("out[i] = (64 / i) + x[i];").kind == "division"


def test_more_threadgroup_memory_than_there_is():
    found = fault(
        "threadgroup float a[8192], b[1]; a[i] = 0; b[0] = 0; out[i] = x[i];",
        threads=1,
        group=1,
        size=1,
    )
    assert found.kind == "threadgroup-memory"
    assert "`b` brings threadgroup memory to 32784 bytes" in str(found)


def test_after_a_fault_the_same_kernel_runs_again():
    source = f"{START} s[i] = x[i]; if (x[0] > 0 && i > 9) return;\n{BARRIER} out[i] = s[63 - i];"
    assert fault(source, mx.ones((64,))).kind == "barrier"
    assert go(source, mx.zeros((64,)))[0] == 0


def test_a_compile_error_shows_the_metal_line():
    with pytest.raises(CompileError, match=r"(?s)no_such.*out\[0\] = no_such\(1\);"):
        go("\n\nout[0] = no_such(1);")


@pytest.mark.parametrize(
    "source",
    [
        "threadgroup float s = 0.0f; out[0] = x[0];",
        "double d = x[0]; out[0] = d;",
        "bfloat b = 1.0f; out[0] = float(b) + x[0];",
        "uint u = 1; out[0] = max(u, 0) + x[0];",
    ],
    ids=["threadgroup value", "double", "implicit bfloat", "mixed max"],
)
def test_what_a_metal_compiler_refuses_is_refused(source):
    with pytest.raises(CompileError):
        go(source)


def test_a_threadgroup_variable_outside_of_the_kernel_is_refused():
    with pytest.raises(CompileError, match="belong into the kernel"):
        go(
            "out[0] = f(x[0]);",
            header="inline float f(float x) { threadgroup float s[2]; s[0] = x; return s[0]; }",
        )


def test_a_threadgroup_declaration_that_cannot_be_read_is_refused():
    """Taken for something else it would give each thread an array of its own."""
    with pytest.raises(CompileError, match=r"cannot be read.*parentheses.*vec<float, X < 3"):
        go(
            "threadgroup metal::vec<float, X < 3 ? 4 : 2> s[64]; s[i].x = x[i]; out[i] = s[i].x;",
            template=[("X", 2)],
        )


def test_an_unknown_finding_cannot_be_allowed():
    with pytest.raises(ValueError, match="not allowable: bounds"):
        go("out[0] = x[0];", allow=["bounds"])
