"""What the kernels of the key-value cache need beyond ``dialect``'s macros.

===================== =============================================================================
``TQ_SHUFFLE(v, l)``   the value of lane l
``TQ_ANY(x)``          whether x is true in any lane of the warp
``TQ_WARP_SYNC()``     shared memory written by lanes of a warp is seen by the others
``TQ_FLOAT_OF(u)``     the float of these bits
``TQ_BITS_OF(f)``      and back
``TQ_MUL(a, b)``       a product that CUDA does not fuse into a sum
``TQ_TRANSPOSE(u)``    CUDA: an 8 by 8 matrix of 16-bit values, spread as the matrix units hold it
``TQ_TABLE(n, p)``     CUDA: n is the table at p in shared memory, as ``TQ_PICK`` wants it
``TQ_PICK``            CUDA: ``TQ_PICK(table, word, shift, bits, copies)``: the entry that a field
                       of a word names; two instructions, its constants known
``TQ_SELECT(m, a, b)`` CUDA: the bits of a where m has ones, else those of b
``TQ_FAST_EXP2(x)``    CUDA: 2**x to a few units in the last place, 0 for what is no normal number
``TQ_WORDS``           CUDA: ``TQ_WORDS(to, n, from, offset, even)``: consecutive words, in as few
                       loads as ``even`` (offsets are multiples of it: 1, 2 or 4) allows
===================== =============================================================================
"""

from __future__ import annotations

from .dialect import Kernel

_METAL = """
#define TQ_SHUFFLE(value, lane) simd_shuffle(value, ushort(lane))
#define TQ_ANY(x) simd_any(x)
#define TQ_WARP_SYNC() simdgroup_barrier(mem_flags::mem_threadgroup)
#define TQ_FLOAT_OF(u) as_type<float>(u)
#define TQ_BITS_OF(f) as_type<uint>(f)
#define TQ_MUL(a, b) ((a) * (b))
"""

_CUDA = """
#define TQ_SHUFFLE(value, lane) __shfl_sync(0xffffffffu, value, lane)
#define TQ_ANY(x) (__any_sync(0xffffffffu, x) != 0)
#define TQ_WARP_SYNC() __syncwarp()
#define TQ_FLOAT_OF(u) __uint_as_float(u)
#define TQ_BITS_OF(f) __float_as_uint(f)
#define TQ_MUL(a, b) __fmul_rn(a, b)
#ifndef TQ_TRANSPOSE
__device__ __forceinline__ tq_uint tq_transposed(tq_uint value) {
  tq_uint turned;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(value));
  return turned;
}
#define TQ_TRANSPOSE(value) tq_transposed(value)
#endif
#ifndef TQ_TABLE
#define TQ_TABLE(name, pointer) const tq_uint name = tq_uint(__cvta_generic_to_shared(pointer))
// The address is a multiple-add or a dot product, whose addend is the table's: no addition is left.
__device__ __forceinline__ tq_uint tq_pick(
    tq_uint table, tq_uint word, int shift, int bits, int size) {
  tq_uint address, entry;
  if (bits == 8 && size < 256 && shift % 8 == 0) {
    address = __dp4a(word, tq_uint(size) << shift, table);
  } else {
    const int up = 31 - __clz(size) - shift;
    const tq_uint field = word & (((1u << bits) - 1u) << shift);
    address = table + (up >= 0 ? field << up : field >> -up);
  }
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(entry) : "r"(address));
  return entry;
}
#define TQ_PICK(table, word, shift, bits, copies) tq_pick(table, word, shift, bits, 4 * (copies))
__device__ __forceinline__ tq_uint tq_select(tq_uint mask, tq_uint a, tq_uint b) {
  tq_uint chosen;
  asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(chosen) : "r"(mask), "r"(a), "r"(b));
  return chosen;
}
#define TQ_SELECT(mask, a, b) tq_select(mask, a, b)
__device__ __forceinline__ float tq_fast_exp2(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}
#define TQ_FAST_EXP2(x) tq_fast_exp2(x)
#endif
template <int N, int EVEN>
__device__ __forceinline__ void tq_words(tq_uint* to, const tq_uint* from) {
  if (EVEN == 4 && N % 4 == 0) {
    TQ_UNROLL for (int i = 0; i < N / 4; ++i) {
      const uint4 v = reinterpret_cast<const uint4*>(from)[i];
      to[4 * i] = v.x; to[4 * i + 1] = v.y; to[4 * i + 2] = v.z; to[4 * i + 3] = v.w;
    }
  } else if (EVEN >= 2 && N % 2 == 0) {
    TQ_UNROLL for (int i = 0; i < N / 2; ++i) {
      const uint2 v = reinterpret_cast<const uint2*>(from)[i];
      to[2 * i] = v.x; to[2 * i + 1] = v.y;
    }
  } else {
    TQ_UNROLL for (int i = 0; i < N; ++i) to[i] = from[i];
  }
}
#define TQ_WORDS(to, n, from, offset, even) tq_words<n, even>(to, from + (offset))
"""


def kv_kernel(name: str, inputs: tuple[str, ...], outputs: tuple[str, ...], body: str) -> Kernel:
    """A kernel whose body may use these macros."""
    return Kernel(name, inputs, outputs, body, metal=_METAL, cuda=_CUDA)
