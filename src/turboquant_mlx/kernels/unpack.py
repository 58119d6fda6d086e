"""Decoding of a packed row, the part that all kernels have in common.

A *unit* is UNIT (8 or 16) consecutive weights of a row, what one lane decodes at a time: whole
bytes of the row's stream. The lanes of a warp take consecutive units, so their reads of codes and
of activations are consecutive too.

Looking up: a scalar code of up to 4 bits reads two weights at once from a table of pairs, wider
codes and trellis codes read one. A window of eight bits (trellis) is a byte of the stream once
this has been shifted by the window's place modulo 8, and windows that lie a multiple of eight bits
apart share the shift: two of a 3-bit code, four of a 2-bit or 4-bit code. Other windows, which the
format permits and our converter does not write, are shifted one by one.

Ternary digits have a decoding of their own, see ``ternary``.

Template arguments: BITS, WINDOW, TILE (weights; 0 for the whole row), GROUP (weights to a scale),
LOG8 (whether scales are codes), UNIT, COPIES (of the table, a power of two up to 32).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..quant.packed import PackedWeight
from ..quant.spec import TRITS_PER_WORD, QuantSpec

CONSTANTS = """
  constexpr bool TRELLIS = WINDOW > BITS;
  constexpr bool BYTES = TRELLIS && WINDOW == 8;  // windows are bytes of the shifted stream
  constexpr int PER_ENTRY = !TRELLIS && BITS <= 4 ? 2 : 1;
  constexpr int ENTRIES = 1 << (TRELLIS ? WINDOW : PER_ENTRY * BITS);
  constexpr int OWN = UNIT * BITS;            // bits that belong to a unit
  constexpr int NEED = OWN + WINDOW - BITS;   // and those that its windows reach
  // a unit begins so many bits into a word at most
  constexpr int GAP = OWN % 32 == 0 ? 0 : OWN % 16 == 0 ? 16 : 24;
  constexpr int WORDS = (GAP + NEED + 31) / 32;
  constexpr int FLUSH = (NEED + 31) / 32;     // words once the stream begins with the unit
  // trellis: after PERIOD windows the place in a byte recurs, STRIDE bytes on
  constexpr int PERIOD = BITS % 8 == 0 ? 1 : BITS % 4 == 0 ? 2 : BITS % 2 == 0 ? 4 : 8;
  constexpr int STRIDE = BITS * PERIOD / 8;
  constexpr int REACH = 3 / STRIDE + 1;       // windows in the bytes of one word
"""

# TQ_LEVEL(i): entry i of the table of levels.
FILL_TABLE = """
  TQ_SHARED(float, lut, ENTRIES * PER_ENTRY * COPIES);
  for (uint i = tq_tid; i < uint(ENTRIES * COPIES); i += uint(WARPS * 32)) {
    const uint entry = i / uint(COPIES);
    if (PER_ENTRY == 2) {
      lut[2u * i] = TQ_LEVEL(entry & ((1u << BITS) - 1u));
      lut[2u * i + 1u] = TQ_LEVEL(entry >> BITS);
    } else {
      lut[i] = TQ_LEVEL(entry);
    }
  }
  TQ_SYNC();
  const uint copy = tq_lane % uint(COPIES);
"""

# Which words of a row hold the unit `at`: sets `gap` and `place[]`. A window that reaches beyond
# its tile reads the tile's beginning. What a scalar code reads beyond its row is not used.
# Signed, so that the compiler may fold the distance of two words into their addresses.
FIND_WORDS = """
    uint gap;
    int place[WORDS];
    {
      const int bit = int(at) * OWN;
      const int word = bit >> 5;
      const int tile_words = TILE > 0 ? TILE * BITS / 32 : words;
      const int tile_end = TILE > 0 ? (word / tile_words + 1) * tile_words : words;
      gap = uint(bit) & 31u;
      TQ_UNROLL for (int j = 0; j < WORDS; ++j) {
        place[j] = word + j;
        if (32 * j >= OWN && place[j] >= tile_end) {
          place[j] = TRELLIS ? place[j] - tile_words : words - 1;
        }
      }
    }
"""

# From `code[WORDS]`, `flush[]`: the stream, beginning with the unit, and a word of zeros.
FLUSH = """
      uint flush[FLUSH + 1];
      TQ_UNROLL for (int j = 0; j <= FLUSH; ++j) flush[j] = 0u;
      TQ_UNROLL for (int j = 0; j < FLUSH; ++j) {
        if (GAP == 0) {
          flush[j] = code[j];
        } else {
          flush[j] = TQ_FUNNEL(code[j], j + 1 < WORDS ? code[j + 1 < WORDS ? j + 1 : 0] : 0u, gap);
        }
      }
"""

# From `code[WORDS]`: TQ_USE(i, value) for each weight i of the unit, scale left out.
DECODE = (
    FLUSH
    + """
      if (BYTES) {
        TQ_UNROLL for (int phase = 0; phase < PERIOD; ++phase) {
          TQ_UNROLL for (int from = phase; from < UNIT; from += PERIOD * REACH) {
            const uint shifted = TQ_FUNNEL(
                flush[from * BITS / 32], flush[from * BITS / 32 + 1], uint(from * BITS % 32));
            TQ_UNROLL for (int j = 0; j < REACH; ++j) {
              if (from + j * PERIOD < UNIT) {
                const float value = TQ_PICK_BYTE(lut, shifted, j * STRIDE, uint(COPIES), copy);
                TQ_USE(from + j * PERIOD, value);
              }
            }
          }
        }
      } else if (PER_ENTRY == 2) {
        TQ_UNROLL for (int i = 0; i < UNIT; i += 2) {
          // where the key lies within one word it is read from there
          const bool whole = i * BITS % 32 + 2 * BITS <= 32;
          const uint key = whole ? flush[i * BITS / 32]
              : TQ_FUNNEL(flush[i * BITS / 32], flush[i * BITS / 32 + 1], uint(i * BITS % 32));
          float one, two;
          TQ_PICK_PAIR(one, two, lut, key, whole ? i * BITS % 32 : 0, 2 * BITS, COPIES, copy);
          TQ_USE(i, one);
          TQ_USE(i + 1, two);
        }
      } else {
        TQ_UNROLL for (int i = 0; i < UNIT; ++i) {
          const uint key = TQ_FUNNEL(
              flush[i * BITS / 32], flush[i * BITS / 32 + 1], uint(i * BITS % 32));
          const float value = lut[(key & ((1u << WINDOW) - 1u)) * uint(COPIES) + copy];
          TQ_USE(i, value);
        }
      }
"""
)

# `scale` of the group `where`.
READ_SCALE = """
      float scale = float(scales[where]);
      if (LOG8) scale = scale == 0.0f ? 0.0f : TQ_EXP2((scale - 240.0f) * 0.0625f);
"""


@dataclass(frozen=True)
class Unit:
    """How a weight is cut into units.

    Attributes:
        weights: UNIT.
        table_bytes: of one copy of the table in shared memory.
        most_copies: of the table, with which no lane waits for another's memory bank.
    """

    weights: int
    table_bytes: int
    most_copies: int


WIDEST_WINDOW = 12
"""Bits: its table takes 16 KiB of the 32 that threadgroups have."""


def why_no_kernel(weight: PackedWeight) -> str:
    """What keeps the kernels from reading this weight; "" if they can."""
    spec, width = weight.spec, weight.shape[-1]
    if weight.codes.size >= 2**31:
        return f"{weight.codes.size} words of codes, more than 32 bits can count"
    if spec.code == "ternary":
        if spec.group_size % 4 or spec.group_size < 16:
            return f"ternary digits in groups of {spec.group_size}"
        return ""
    if spec.window_bits > WIDEST_WINDOW:
        return f"a window of {spec.window_bits} bits"
    if width % 8 or spec.group_size % 8:
        return f"a width of {width} in groups of {spec.group_size}"
    if spec.is_trellis and width * spec.bits % 32:
        return f"rows of {width} weights, which end within a word"
    if spec.tile % 8:
        return f"tiles of {spec.tile} weights"
    return ""


def unit_of(spec: QuantSpec, width: int) -> Unit:
    """The largest unit that neither a row, a group nor a tile cuts; of ternary digits, a word."""
    if spec.code == "ternary":
        return Unit(TRITS_PER_WORD, 3**4 * 16, 8)
    wide = width % 16 == 0 and spec.group_size % 16 == 0 and spec.tile % 16 == 0
    paired = not spec.is_trellis and spec.bits <= 4
    entries = 1 << (spec.window_bits if not paired else 2 * spec.bits)
    return Unit(16 if wide else 8, entries * (8 if paired else 4), 16 if paired else 32)
