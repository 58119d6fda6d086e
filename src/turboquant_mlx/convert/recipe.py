"""Which module of a model is quantized how, and which are left alone, and why.

A pure function of names, shapes and options: the same plan serves the conversion and the
planner's estimate of it. No MLX here.

Rules, in the order in which they are asked:

* Linear layers and expert stacks are candidates; embeddings (a tied head among them), norms,
  convolutions and modules of other classes are not.
* A router stays at its source precision, whether its name or the model's own ``quant_predicate``
  says that it is one. So does everything that the predicate refuses (False) or wants special
  treatment for (a dict), except where the dict only guards against a weakness of MLX's
  floating-point formats (``_GUARDED_FOR_FP_FORMATS``).
* Fewer than 32 inputs or outputs are not worth a rotation.
* The group size is the requested one, or the largest smaller one that divides the input width.
  Where none is requested, trellis codes have one 8-bit scale for each rotation block of a row:
  finer scales gain less than their bits are worth there.
* Modules of one parent that read the same activation form a rotation group.
* With ``quantize_extras``, embeddings and the linears left over become MLX affine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ..errors import OptionError
from ..quant.rotation import block_size, rotation_block
from ..quant.spec import GROUP_SIZES, QuantSpec, ScaleLayout
from ..quant.trellis_table import TRELLIS_WINDOW
from .options import DEFAULT_GROUP_SIZE, ConvertOptions, flag
from .roles import EXPERT_DOWN, Role, layer_of, reads_block_input, role_of

ModuleKind = Literal["linear", "switch", "embedding", "multi_linear", "conv", "other"]
Action = Literal["quantize", "affine", "keep"]

SMALLEST_SIDE = 32
SCALE_LAYOUT: ScaleLayout = "log8"  # no worse than float16 at the same group size
AFFINE_GROUP_SIZES = (32, 64, 128)
AFFINE_BITS = (2, 3, 4, 5, 6, 8)

# granite and granitemoe ask for 8 bits here because the block maxima of these weights underflow
# the scales of nvfp4 and its kin. Ours are stored relative to the largest one of the tensor.
_GUARDED_FOR_FP_FORMATS = frozenset({"o_proj", "down_proj", "lm_head"})

KEPT_ROUTER = "router"
KEPT_EMBEDDING = "embedding"
KEPT_NORM = "norm"
KEPT_CONV = "convolution"
KEPT_MULTI_LINEAR = "per-head projections of latent attention"
KEPT_OTHER = "other parameters"
KEPT_BY_MODEL = "kept by the model's own rule"
KEPT_SMALL = f"fewer than {SMALLEST_SIDE} inputs or outputs"
KEPT_WIDTH = "input width that no group size divides"
KEPT_AFFINE_WIDTH = "width that no group size of MLX's affine mode divides"


@dataclass(frozen=True)
class ModuleInfo:
    """One module that owns parameters, as the model class builds it.

    Attributes:
        path: its path in the mlx-lm model.
        kind: "linear" and "embedding" stand for exactly ``nn.Linear`` and ``nn.Embedding``,
            "switch" for an expert stack, "multi_linear" for MLA's per-head matrices.
        shape: shape of its weight, (O, I) or (E, O, I); of its first parameter for other kinds.
        dtype: name of the weight's type in safetensors files.
        has_bias: whether it adds a bias.
        predicate: what the model's own ``quant_predicate`` says of it, None without one.
        num_parameters: all its parameters, bias included.
    """

    path: str
    kind: ModuleKind
    shape: tuple[int, ...]
    dtype: str = "BF16"
    has_bias: bool = False
    predicate: bool | dict[str, Any] | None = None
    num_parameters: int = 0

    @property
    def width(self) -> int:
        """Input width (embeddings: size of one entry; 1 for a scalar)."""
        return self.shape[-1] if self.shape else 1


@dataclass(frozen=True)
class Decision:
    """What happens to one module.

    Attributes:
        path: the module.
        action: "quantize" (our code), "affine" (MLX's) or "keep".
        role: what the module is for.
        spec: for "quantize", how.
        affine: for "affine", (bits, group size).
        rotation_group: for "quantize", the path of the group's leader.
        reason: for "keep", why, in words that group well; else what was adapted, or "".
    """

    path: str
    action: Action
    role: Role
    spec: QuantSpec | None = None
    affine: tuple[int, int] | None = None
    rotation_group: str | None = None
    reason: str = ""

    @property
    def method(self) -> str:
        """Short name of the storage, as the summary's table shows it."""
        if self.affine is not None:
            return "affine {}-bit g{}".format(*self.affine)
        if self.spec is None:
            return "kept"
        code = "ternary" if self.spec.code == "ternary" else f"{self.spec.bits}-bit"
        if self.spec.is_trellis:
            code += " trellis"
        return f"{code} g{self.spec.group_size}" + (" + QJL" if self.spec.qjl else "")


@dataclass(frozen=True)
class Plan:
    """The decisions for all modules, in module order, and what the user should be told."""

    decisions: tuple[Decision, ...]
    notices: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def quantizes_nothing(self) -> bool:
        """Whether no module gets our code (affine extras alone are no conversion)."""
        return not any(d.action == "quantize" for d in self.decisions)

    def by_path(self) -> dict[str, Decision]:
        """Path -> decision."""
        return {d.path: d for d in self.decisions}

    def why_kept(self) -> dict[str, int]:
        """Reason -> number of modules left alone, most frequent first."""
        return dict(Counter(d.reason for d in self.decisions if d.action == "keep").most_common())


def plan_modules(
    modules: Sequence[ModuleInfo],
    options: ConvertOptions,
    widths: Mapping[str, int] | None = None,
) -> Plan:
    """Decide what happens to each module.

    Args:
        modules: all modules with parameters of their own, in module order.
        options: what the user asked for.
        widths: path -> bits of modules whose width no option fixes (see ``is_free``), in place of
            ``options.bits``.

    Returns:
        the plan: one decision per module, same order.

    Raises:
        OptionError: the tiers file names a layer without experts.
    """
    options.validate()
    widths = widths or {}
    candidates = [_decide(m, role_of(m.path, m.kind), options, widths.get(m.path)) for m in modules]
    plan = Plan(tuple(_share_rotations(modules, candidates)))
    _report_layers(plan, options)
    _report_idle_options(plan, options)
    _report_adaptations(modules, plan)
    return plan


def fit_group_size(width: int, requested: int) -> int | None:
    """``requested``, or the largest permitted group size below it that divides ``width``."""
    sizes = {requested, *(size for size in GROUP_SIZES if size < requested)}
    return max((size for size in sizes if width % size == 0), default=None)


def largest_group_size(width: int) -> int | None:
    """The length of the longest rotation block, or a group size of others where that is longer."""
    sizes = (*GROUP_SIZES, block_size(width))
    return max((n for n in sizes if n >= GROUP_SIZES[0] and width % n == 0), default=None)


def fit_affine_group_size(width: int, requested: int) -> int | None:
    """``requested``, or the largest group size of MLX's affine mode that divides ``width``."""
    if width % requested == 0:
        return requested
    return max((size for size in AFFINE_GROUP_SIZES if width % size == 0), default=None)


def is_free(module: ModuleInfo, options: ConvertOptions) -> bool:
    """Whether no option but ``bits`` says how many bits a module gets."""
    role = role_of(module.path, module.kind)
    if role == "attention":
        return options.attn_bits is None
    if role == "mlp":
        return options.mlp_bits is None
    if role != "expert":
        return True
    layer = layer_of(module.path)
    fixed = (
        options.ternary_experts
        or options.mlp_bits is not None
        or layer in options.expert_layer_tiers
        or layer in options.protect_expert_layers
        or (options.expert_down_bits is not None and _is_expert_down(module.path))
    )
    return not fixed


def _decide(module: ModuleInfo, role: Role, options: ConvertOptions, width: int | None) -> Decision:
    requested: int | None
    wanted = options.group_size
    if role in ("mlp", "expert") and options.mlp_group_size is not None:
        wanted = options.mlp_group_size
    code = str(width) if width is not None else _code(module, role, options)
    trellis = options.codec == "trellis" and code != "ternary"
    if trellis and wanted is None:
        requested = group_size = largest_group_size(module.width)
    else:
        requested = wanted or DEFAULT_GROUP_SIZE
        group_size = fit_group_size(module.width, requested)
    kept = _reason_to_keep(module, role)
    if kept is None and group_size is not None:
        spec = QuantSpec(
            code="ternary" if code == "ternary" else "scalar",
            bits=2 if code == "ternary" else int(code),
            window_bits=TRELLIS_WINDOW if trellis else 0,
            group_size=group_size,
            scale_layout=SCALE_LAYOUT,
            rotation_block=rotation_block(module.width, options.rotation, group_size),
            qjl=options.use_qjl,
        )
        reason = _adapted(group_size, requested, module.width)
        return Decision(module.path, "quantize", role, spec, None, module.path, reason)
    kept = kept or KEPT_WIDTH
    if options.quantize_extras and _may_be_affine(module, kept):
        requested = options.extras_group_size
        group_size = fit_affine_group_size(module.width, requested)
        if group_size is not None:
            affine = (_affine_bits(module, options), group_size)
            reason = _adapted(group_size, requested, module.width)
            return Decision(module.path, "affine", role, affine=affine, reason=reason)
        kept = KEPT_AFFINE_WIDTH
    return Decision(module.path, "keep", role, reason=kept)


def _reason_to_keep(module: ModuleInfo, role: Role) -> str | None:
    if role == "router":
        return KEPT_ROUTER
    if module.kind == "multi_linear":
        return KEPT_MULTI_LINEAR
    if module.kind == "conv":
        return KEPT_CONV
    if module.kind == "other":
        return KEPT_NORM if role == "norm" else KEPT_OTHER
    if _model_objects(module):
        return KEPT_BY_MODEL
    if module.kind == "embedding":
        return KEPT_EMBEDDING
    return KEPT_SMALL if _is_small(module) else None


def _is_small(module: ModuleInfo) -> bool:
    return min(module.shape[-2:]) < SMALLEST_SIDE


def _model_objects(module: ModuleInfo) -> bool:
    if isinstance(module.predicate, dict):
        guarded = module.path.rpartition(".")[2] in _GUARDED_FOR_FP_FORMATS
        return module.kind != "embedding" and not guarded
    return module.predicate is False


def _may_be_affine(module: ModuleInfo, kept: str) -> bool:
    """Whether ``quantize_extras`` reaches a module that our code leaves for the reason ``kept``."""
    if kept == KEPT_EMBEDDING:
        return True
    return kept == KEPT_BY_MODEL and module.predicate is not False and not _is_small(module)


def _affine_bits(module: ModuleInfo, options: ConvertOptions) -> int:
    """The extras' bits, or more where the model itself asks for more."""
    wanted = module.predicate.get("bits", 0) if isinstance(module.predicate, dict) else 0
    return max(options.extras_bits, wanted if wanted in AFFINE_BITS else 0)


def _adapted(used: int, requested: int | None, width: int) -> str:
    if used == requested:
        return ""
    return f"group size {used}: {requested} does not divide the width {width}"


def _code(module: ModuleInfo, role: Role, options: ConvertOptions) -> str:
    """The width in bits as a string, or "ternary"."""
    if role == "attention":
        return str(options.attn_bits or options.bits)
    if role == "mlp":
        return str(options.mlp_bits or options.bits)
    if role != "expert":
        return str(options.bits)
    layer = layer_of(module.path)
    down_bits = options.expert_down_bits if _is_expert_down(module.path) else None
    if layer is not None and layer in options.expert_layer_tiers:
        return options.expert_layer_tiers[layer]
    if layer in options.protect_expert_layers:
        return str(max(options.protect_bits, down_bits or 0))
    if down_bits is not None:
        return str(down_bits)
    return "ternary" if options.ternary_experts else str(options.mlp_bits or options.bits)


def _is_expert_down(path: str) -> bool:
    return path.rpartition(".")[2] in EXPERT_DOWN


def _share_rotations(
    modules: Sequence[ModuleInfo], decisions: Sequence[Decision]
) -> list[Decision]:
    """Give modules of one parent that read the same activation one leader, the first of them."""
    siblings: dict[str, set[str]] = {}
    for module in modules:
        parent, _, last = module.path.rpartition(".")
        siblings.setdefault(parent, set()).add(last)
    leaders: dict[tuple, str] = {}
    result = []
    for module, decision in zip(modules, decisions, strict=True):
        if decision.spec is not None:
            parent = module.path.rpartition(".")[0]
            if reads_block_input(module.path, frozenset(siblings[parent])):
                key = (parent, module.kind, module.width, decision.spec.rotation_block)
                leader = leaders.setdefault(key, module.path)
                decision = replace(decision, rotation_group=leader)
        result.append(decision)
    return result


def _report_layers(plan: Plan, options: ConvertOptions) -> None:
    """Layers named by the expert options that have no experts."""
    with_experts = {
        layer_of(d.path) for d in plan.decisions if d.role == "expert" and d.action == "quantize"
    } - {None}
    if not with_experts:
        return  # the whole option is idle: _report_idle_options
    missing = sorted(set(options.expert_layer_tiers) - with_experts)
    if missing:
        raise OptionError(
            f"--expert-layer-tiers names {_layers(missing)}, which "
            + ("has" if len(missing) == 1 else "have")
            + " no experts",
            hint=f"the experts of this model are in {_layers(with_experts)}",
        )
    missing = sorted(set(options.protect_expert_layers) - with_experts)
    if missing:
        plan.warnings.append(
            f"--protect-expert-layers: nothing to protect in {_layers(missing)}, the experts of "
            f"this model are in {_layers(with_experts)}"
        )
    usual = 0 if options.ternary_experts else options.mlp_bits or options.bits
    if set(options.protect_expert_layers) & with_experts and options.protect_bits < usual:
        plan.warnings.append(
            f"--protect-bits {options.protect_bits} gives the protected layers fewer bits than "
            f"the other experts have ({usual})"
        )


def _report_idle_options(plan: Plan, options: ConvertOptions) -> None:
    """Options that reach no module of this model."""
    quantized = {d.role for d in plan.decisions if d.action == "quantize"}
    needs: list[tuple[str, bool, str]] = [
        ("attn_bits", "attention" in quantized, "no attention layer is quantized"),
        ("mlp_bits", bool(quantized & {"mlp", "expert"}), "no MLP or expert is quantized"),
        ("mlp_group_size", bool(quantized & {"mlp", "expert"}), "no MLP or expert is quantized"),
        *(
            (name, "expert" in quantized, "it has no experts to quantize")
            for name in (
                "ternary_experts",
                "expert_down_bits",
                "protect_expert_layers",
                "expert_layer_tiers",
            )
        ),
        (
            "quantize_extras",
            any(d.action == "affine" for d in plan.decisions),
            "there is nothing left that it could quantize",
        ),
    ]
    for name, effective, why in needs:
        if getattr(options, name) and not effective:
            plan.notices.append(f"{flag(name)} has no effect on this model: {why}")


def _report_adaptations(modules: Sequence[ModuleInfo], plan: Plan) -> None:
    adapted = Counter(d.reason for d in plan.decisions if d.action != "keep" and d.reason)
    for reason, count in adapted.items():
        verb = "uses" if count == 1 else "use"
        plan.notices.append(f"{_count(count, 'module')} {verb} {reason}")
    unfit = [
        m
        for m, d in zip(modules, plan.decisions, strict=True)
        if d.action == "keep" and d.reason == KEPT_WIDTH
    ]
    if unfit:
        widths = ", ".join(str(width) for width in sorted({m.width for m in unfit}))
        plan.notices.append(
            f"{_count(len(unfit), 'module')} left at source precision: no group size divides the "
            f"width {widths}"
        )
    guarded = sum(
        isinstance(m.predicate, dict) and d.action == "quantize"
        for m, d in zip(modules, plan.decisions, strict=True)
    )
    if guarded:
        plan.notices.append(
            f"{_count(guarded, 'module')} quantized as asked although the model's own rule wants "
            "8 bits: it guards against an underflow that our scales do not have"
        )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _layers(layers: Iterable[int | None]) -> str:
    """Layer numbers as text, runs joined: "layer 3", "layers 0-5, 7"."""
    numbers = sorted(layer for layer in layers if layer is not None)
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"layer {text}" if len(numbers) == 1 else f"layers {text}"
