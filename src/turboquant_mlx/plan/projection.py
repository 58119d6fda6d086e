"""How much memory a model takes at a context length, and whether a machine has it.

Everything is a pure function of three records: the model's files, its weights and the machine.
Each term carries its basis in words. What is not known is None, never zero.

Units: bytes throughout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import OptionError
from ..kvcache.geometry import Attention, Geometry, describe, text_config, why_unknown
from ..kvcache.spec import KVSpec
from . import DEFAULT_CONTEXT
from .cache import (
    GROWN_LAYERS,
    describe_kinds,
    describe_size,
    packing_bytes,
    size_of,
    without_idle_packing,
)
from .headers import ModelFiles
from .machine import GB, MIB, Machine
from .verdict import DEFAULT_CHUNK, Verdict, judge, kv_flags
from .weights import Weights, weigh

CHUNKS = (DEFAULT_CHUNK, 1024, 512, 256, 128)
"""Prefill chunks to choose from."""
SAFE_SHARE = 0.95
"""Share of the ceiling that a chunk chosen here may fill."""

# Arrays of one layer that exist at once while a chunk passes. In units of the hidden size:
# residual, norm, its rotation, queries with keys and values, attention's answer and its projection.
# In units of the MLP's: gate, up and their product.
_LIVE_HIDDEN = 6
_LIVE_MLP = 3
# MLX hands a GPU its work in batches and frees an array when the batch that last reads it is done.
# On an H200 a batch is 100 operations, a decoder layer about 25 of them: while one batch runs and
# the next is queued, the arrays of 8 layers exist. Metal's batches are 40 to 50 operations: there
# this is an upper bound, and so is ``cache.GROWN_LAYERS``.
_LIVE_LAYERS = 8
# Heads for which MLX's fused attention needs no score matrix; where it does, scores and their
# exponentials exist at once.
_FUSED_DIMS = {"metal": (64, 80, 128), "cuda": (64, 80, 96, 128), "cpu": ()}
_SCORE_COPIES = 2
# Scores and their exponentials in each of two threads (kernels.cpu_attention.SCORE_BYTES).
_CPU_SCORE_BYTES = 4 * MIB * 4
# The two sums of a layer's residual stream, in 16 bits, until a chunk is done.
_CPU_KEPT = 4
# Share of the free memory that the CPU back-end fills with float32 copies of the weights.
_CPU_KEEP_SHARE = 0.7
# Resident memory of Python with MLX, mlx-lm, NumPy and transformers imported, and what a tokenizer
# takes per entry of its vocabulary (strings, ids and merges): measured, Linux x86-64.
_CPU_RESERVE = 90 * 10**6
_TOKENIZER_BYTES = 1000
# Allocator, driver and kernels that MLX's counter does not see: an allowance.
_GPU_RESERVE = 500 * 10**6
# Decoded weights of one matrix that a product of many rows needs on a GPU.
_DECODE_BYTES = 64 * MIB


@dataclass(frozen=True)
class Term:
    """One part of the sum: bytes, None where unknown, and where the number comes from."""

    bytes: int | None
    basis: str


@dataclass(frozen=True)
class Request:
    """What to plan for.

    Attributes:
        context: tokens of prompt and answer.
        kv: packing of the key-value cache, None for 16 bits.
        prefill_step_size: tokens per prefill chunk, None to choose the largest safe one.
        ngram_offload: serve n-gram tables from disk.
        kv_bits: the user's own words for the widths of ``kv``, as --kv-bits takes them, for the
            command line that is shown.
        default_context: whether nobody asked for this context, so that it is cut to what the model
            was made for.

    Raises:
        OptionError: a value of another type or out of range.
    """

    context: int = DEFAULT_CONTEXT
    kv: KVSpec | None = None
    prefill_step_size: int | None = None
    ngram_offload: bool = False
    kv_bits: str | None = None
    default_context: bool = False

    def __post_init__(self) -> None:
        for name in ("context", "prefill_step_size"):
            value = getattr(self, name)
            if value is None and name != "context":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
                flag = "--" + name.replace("_", "-")
                raise OptionError(f"{flag} {value!r} is not a number of tokens (1 or more)")
        if self.kv is not None and not isinstance(self.kv, KVSpec):
            raise OptionError(
                f"kv must be a KVSpec or None, not {self.kv!r}",
                hint="KVSpec(4, 4) packs keys and values in 4 bits",
            )
        if not isinstance(self.ngram_offload, bool):
            raise OptionError(f"ngram_offload must be True or False, not {self.ngram_offload!r}")


@dataclass(frozen=True)
class Projection:
    """What a model will take.

    Attributes:
        request: what was asked.
        weights, kv, workspace, reserve: the terms; ``peak`` is their sum.
        expanded: float32 copies that the CPU back-end makes of the weights.
        step: tokens of a prefill chunk.
        ceiling: what the machine gives.
        geometry: the caches, None where unknown.
        kv_note: what of the cache is packed.
        kv_per_token: bytes that each further token adds, None where unknown.
        experts_hot: bytes of experts that the machine can keep, when they are streamed.
    """

    request: Request
    weights: Term
    expanded: Term
    kv: Term
    workspace: Term
    reserve: Term
    step: int
    ceiling: Term
    geometry: Geometry | None
    kv_note: str
    kv_per_token: float | None
    experts_hot: int | None = None

    @property
    def terms(self) -> dict[str, Term]:
        """Name -> term, in the order of the report."""
        return {
            "weights": self.weights,
            "expanded weights": self.expanded,
            "key-value cache": self.kv,
            "prefill workspace": self.workspace,
            "runtime reserve": self.reserve,
        }

    @property
    def peak(self) -> int | None:
        """Bytes at the worst moment, None if a term is unknown."""
        total = 0
        for term in self.terms.values():
            if term.bytes is None:
                return None
            total += term.bytes
        return total

    @property
    def allocated(self) -> int | None:
        """The peak without the reserve: what MLX's own counter shows on a GPU."""
        return None if self.peak is None else self.peak - (self.reserve.bytes or 0)

    @property
    def known(self) -> int:
        """Sum of the terms that are known: a lower bound of the peak."""
        return sum(term.bytes or 0 for term in self.terms.values())

    @property
    def headroom(self) -> int | None:
        """Ceiling less peak, negative where it does not fit; None if either is unknown."""
        if self.peak is None or self.ceiling.bytes is None:
            return None
        return self.ceiling.bytes - self.peak


@dataclass(frozen=True)
class Plan:
    """Everything that was found out; ``report`` shows it."""

    model: ModelFiles
    weights: Weights
    machine: Machine
    projection: Projection
    verdict: Verdict
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    extras: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values, see docs/reference/plan.schema.json."""
        from .report import plan_dict

        return plan_dict(self)


def plan_model(model: ModelFiles, machine: Machine, request: Request) -> Plan:
    """Project a model onto a machine.

    Raises:
        CheckpointError: the model's files contradict each other.
        OptionError: the request does not suit the model.
    """
    weights = weigh(model)
    longest = size_of(text_config(model.config), "max_position_embeddings")
    if request.default_context:
        request = replace(request, context=min(request.context, longest or request.context))
    request, notes = without_idle_packing(model.config, request)
    projection = project(model.config, weights, machine, request)
    warnings = []
    if projection.geometry is None:
        warnings.append(f"the key-value cache is unknown: {why_unknown(model.config)}")
    if weights.senses and weights.senses_loaded:
        warnings.append(
            "what pictures and sound take while they are read is not counted, only the weights of "
            "their towers: mlx-vlm loads this model whole"
        )
    elif weights.senses:
        warnings.append(
            f"this is the text part, as mlx-lm loads it; mlx-vlm loads {weights.senses / GB:.2f} "
            "GB of towers besides and needs memory for pictures"
        )
    if weights.is_moe and weights.token_experts is None:
        warnings.append("config.json does not say how many experts a token uses")
    if longest is not None and request.context > longest:
        warnings.append(
            f"--context {request.context} is beyond the {longest} tokens that the model was "
            "made for"
        )
    if request.ngram_offload and not weights.ngram:
        warnings.append("--ngram-offload has no effect: this model has no n-gram table")
    elif request.ngram_offload:
        warnings.append(
            "--ngram-offload is planned for, but no command of this version keeps the table on "
            f"disk: until one does, {weights.ngram / GB:.2f} GB more are needed"
        )
    if kv_flags(request) is None:
        warnings.append("no options of the commands ask for this packing of the cache")
    if machine.device_basis.endswith("(estimated)"):
        warnings.append(f"the ceiling is an estimate: {machine.device_basis}")
    if machine.backend == "cpu" and not machine.assumed:
        warnings.append("there is no GPU that MLX can use: the model would run on the CPU")
    verdict = judge(weights, machine, projection)
    if verdict.mode == "resident":
        warnings += _chunk_warning(model.config, weights, machine, projection, verdict)
    notes = [*model.notes, *notes]
    return Plan(model, weights, machine, projection, verdict, tuple(warnings), tuple(notes))


def _chunk_warning(
    config: Mapping[str, Any],
    weights: Weights,
    machine: Machine,
    projection: Projection,
    verdict: Verdict,
) -> list[str]:
    """What to know about a chunk that was chosen and is not the usual one, of a model that fits."""
    step, request = projection.step, projection.request
    if step == DEFAULT_CHUNK or request.prefill_step_size is not None:
        return []
    ceiling = machine.raised_ceiling_bytes if verdict.needs_wired_bump else machine.ceiling_bytes
    usual = _project(config, weights, machine, request, DEFAULT_CHUNK).known
    if ceiling is not None and usual <= ceiling:
        share = f"{usual / ceiling:.0%}"
        what = f"chunks of {step} tokens are recommended: {DEFAULT_CHUNK} would take {share} of "
        what += "what there is, and the sum is an estimate"
    else:
        what = f"it fits only if prompts are read in chunks of {step} tokens and not of "
        what += str(DEFAULT_CHUNK)
    return [f"{what} (--prefill-step-size {step}; in Python prefill_step_size={step})"]


def project(
    config: Mapping[str, Any], weights: Weights, machine: Machine, request: Request
) -> Projection:
    """Add up what a model takes; the chunk is the largest safe one unless it is given."""
    if request.prefill_step_size is not None:
        return _project(config, weights, machine, request, request.prefill_step_size)
    for step in CHUNKS:
        projection = _project(config, weights, machine, request, step)
        ceiling = machine.ceiling_bytes
        if ceiling is None or projection.known <= SAFE_SHARE * ceiling:
            return projection
    return projection


def _project(
    config: Mapping[str, Any], weights: Weights, machine: Machine, request: Request, step: int
) -> Projection:
    geometry = describe(config)
    element_bytes = 4 if weights.precision == "F32" else 2
    kv, per_token = Term(None, "unknown: " + why_unknown(config)), None
    if geometry is not None:
        size = geometry.nbytes(request.context, request.kv, element_bytes)
        kv = Term(size, describe_size(config, request))
        per_token = geometry.bytes_per_token(request.kv, element_bytes)
    workspace = _workspace(config, geometry, weights, machine, request, step)
    if geometry is not None and request.kv is not None and workspace.bytes is not None:
        extra = packing_bytes(geometry, machine, request, element_bytes)
        if extra:
            until = f"until {request.kv.warm_tokens} tokens are packed"
            text = f"{workspace.basis}, and the 16-bit cache {until}"
            workspace = Term(workspace.bytes + extra, text)
    loaded, basis = weights.loaded, weights.basis
    if request.ngram_offload and weights.ngram:
        loaded -= weights.ngram
        basis += f", without {weights.ngram / GB:.2f} GB of n-gram tables"
    projection = Projection(
        request=request,
        weights=Term(loaded, basis),
        expanded=_expanded(weights, machine, loaded),
        kv=kv,
        workspace=workspace,
        reserve=_reserve(config, machine),
        step=step,
        ceiling=Term(machine.ceiling_bytes, machine.ceiling_basis),
        geometry=geometry,
        kv_note="" if geometry is None else describe_kinds(geometry, request),
        kv_per_token=per_token,
    )
    return replace(projection, experts_hot=_hot_experts(weights, machine, projection))


def _expanded(weights: Weights, machine: Machine, loaded: int) -> Term:
    if machine.backend != "cpu":
        return Term(0, "only on the CPU")
    size = 4 * weights.matrices
    if machine.ram_bytes is None:
        return Term(None, "unknown: so is main memory")
    if size > _CPU_KEEP_SHARE * (machine.ram_bytes - loaded):
        return Term(0, "float32 copies would not fit: decoded on each call, slower")
    return Term(size, "float32 copies for the CPU (none with --cpu-expand never)")


def _reserve(config: Mapping[str, Any], machine: Machine) -> Term:
    if machine.backend == "cpu":
        vocabulary = size_of(text_config(config), "vocab_size") or 0
        size = _CPU_RESERVE + _TOKENIZER_BYTES * vocabulary
        return Term(size, "Python, libraries and tokenizer, measured")
    return Term(_GPU_RESERVE, "allocator and runtime, a fixed allowance")


def _workspace(
    config: Mapping[str, Any],
    geometry: Geometry | None,
    weights: Weights,
    machine: Machine,
    request: Request,
    step: int,
) -> Term:
    text = text_config(config)
    hidden = size_of(text, "hidden_size", "n_embd", "d_model", "model_dim", "hidden_dim")
    if hidden is None:
        return Term(None, "unknown: config.json has no hidden_size")
    heads = size_of(text, "num_attention_heads", "n_head", "n_heads", "num_heads") or 1
    inner = size_of(text, "intermediate_size", "n_inner", "ffn_hidden_size") or 4 * hidden
    if weights.is_moe:
        routed = size_of(text, "moe_intermediate_size", "expert_ffn_hidden_size") or inner
        per_token = (weights.experts_per_token or 1) * (routed * _LIVE_MLP + 2 * hidden)
        inner = max(inner, per_token // _LIVE_MLP)
    vocabulary = size_of(text, "vocab_size") or 0
    rows = min(step, request.context)
    width = 6 if machine.backend == "cpu" else 2  # 16-bit activations, float32 ones beside on a CPU
    layers = weights.layers or 1
    live = rows * (_LIVE_HIDDEN * hidden + _LIVE_MLP * inner) * width
    if machine.backend == "cpu":
        live += rows * layers * _CPU_KEPT * hidden
    else:
        live *= min(layers, _LIVE_LAYERS)
    attention, grown = _attention(geometry, heads, machine, rows, request)
    # MLX never computes logits that nobody asks for; on the CPU products leave it one by one, the
    # last one too: those of the whole chunk, in float32 for NumPy and in 16 bits for MLX
    logits = rows * vocabulary * (4 + 2) if machine.backend == "cpu" else vocabulary * 3 * 4
    decode = _DECODE_BYTES if weights.quantization == "turboquant" else 0
    if machine.backend == "cpu":
        decode = 0
    kind = "all logits" if machine.backend == "cpu" else "logits of one row"
    basis = f"chunks of {step} tokens: activations, attention, {kind}"
    return Term(live + attention + grown + logits + decode, basis)


def _attention(
    geometry: Geometry | None, heads: int, machine: Machine, rows: int, request: Request
) -> tuple[int, int]:
    """(bytes of score matrices or decoded keys and values, bytes of caches while they grow)."""
    if geometry is None:
        return 0, 0
    context, scores = request.context, 0
    for piece in geometry.pieces():
        if not isinstance(piece, Attention):
            continue
        seen = context if piece.window is None else min(context, piece.window + rows)
        plain = seen * piece.heads * (piece.key_dim + piece.value_dim) * 2
        if machine.backend == "cpu":
            # keys and values of a layer are widened to float32
            scores = max(scores, _CPU_SCORE_BYTES + 2 * plain)
            continue
        fused = piece.key_dim == piece.value_dim and piece.key_dim in _FUSED_DIMS[machine.backend]
        matrix = 0 if fused else heads * rows * seen * 2 * _SCORE_COPIES
        # a packed cache is decoded for a chunk, one layer at a time
        decoded = plain if request.kv is not None and piece.window is None else 0
        scores = max(scores, matrix + decoded)
    if machine.backend == "cpu":
        return scores, 0
    kinds = geometry.bytes_by_kind(context, request.kv)
    growing = sum(kinds.get(kind, 0) for kind in ("full", "latent", "index", "compressed"))
    return scores, growing * min(GROWN_LAYERS, len(geometry.layers)) // len(geometry.layers)


def _hot_experts(weights: Weights, machine: Machine, projection: Projection) -> int | None:
    """Bytes left for experts once everything else is in memory."""
    if not weights.is_moe or machine.ceiling_bytes is None or projection.peak is None:
        return None
    if machine.backend == "cpu":
        return None
    return max(machine.ceiling_bytes - (projection.peak - weights.experts), 0)
