"""Which pieces each model type keeps: one rule per family, and which types belong to it.

A rule reads the language model's part of config.json and returns the layers' pieces, in the order
and with the sizes of mlx-lm's classes (mlx-vlm's language models keep the same). Where a published
config leaves a value out, the class's own default stands in (``architecture_defaults``).

No MLX here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .architecture_defaults import DEFAULTS
from .pieces import Attention, Layer, State, UnknownGeometryError

# The largest number that any field of an honest config has.
_LARGEST = 1 << 40
_MOST_LAYERS = 10_000


class Settings:
    """The language model's config, read strictly.

    Attributes:
        assumed: what was absent, with the value that was used instead.
    """

    def __init__(self, model_type: str, config: Mapping[str, Any], outer: Mapping[str, Any]):
        self.model_type = model_type
        self.outer = outer
        self.assumed: dict[str, Any] = {}
        self._config = config
        self._defaults = DEFAULTS.get(model_type, {})

    def has(self, name: str) -> bool:
        """Whether a value is given (null counts as absent)."""
        return self._config.get(name) is not None

    def get(self, name: str, default: Any = None) -> Any:
        """The value of any type; else the class's default, else ``default``."""
        if self.has(name):
            return self._config[name]
        if name in self._defaults:
            self.assumed[name] = self._defaults[name]
            return self._defaults[name]
        return default

    def number(self, name: str, default: int | None = None) -> int:
        """A whole number.

        Raises:
            UnknownGeometryError: it is absent and has no default, or is no number of anything.
        """
        value = self.get(name, default)
        if value is None:
            raise UnknownGeometryError(f"config.json has no {name}")
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _LARGEST:
            raise UnknownGeometryError(f"config.json: {name} {value!r} is not a size")
        return value

    def first_number(self, *names: str) -> int:
        """The first of several spellings that is given."""
        return self.number(next((name for name in names if self.has(name)), names[0]))

    def sequence(self, name: str, length: int | None = None) -> list[Any] | None:
        """A list, or None where it is absent.

        Raises:
            UnknownGeometryError: it is no list, or shorter than ``length``.
        """
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, (list, tuple)) or (length is not None and len(value) < length):
            raise UnknownGeometryError(f"config.json: {name} does not name every layer")
        return list(value)

    def nested(self, name: str) -> Settings:
        """A nested object as settings of its own."""
        value = self.get(name)
        if not isinstance(value, Mapping):
            raise UnknownGeometryError(f"config.json has no {name}")
        return Settings("", value, self.outer)

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
        number = self.number("num_hidden_layers")
        if number > _MOST_LAYERS:
            raise UnknownGeometryError(f"config.json: {number} layers are not a model")
        return number

    @property
    def heads(self) -> int:
        return self.number("num_attention_heads")

    @property
    def kv_heads(self) -> int:
        return self.number("num_key_value_heads", self.heads)

    @property
    def derived_head_dim(self) -> int:
        """Hidden size by heads, for the classes that know no ``head_dim``."""
        return _divide(self.number("hidden_size"), self.heads)

    @property
    def head_dim(self) -> int:
        return self.number("head_dim") if self.get("head_dim") else self.derived_head_dim


Rule = Callable[[Settings], Iterable[Layer]]


def find(config: Mapping[str, Any], text: Mapping[str, Any]) -> tuple[str, Settings]:
    """The rule's name for a config, and the settings that it reads.

    A nested text config names its own type; where that type is unknown or absent, the outer one
    decides.

    Raises:
        UnknownGeometryError: there is no rule for it.
    """
    outer, inner = config.get("model_type"), text.get("model_type")
    if config.get("model_type") == "bailing_hybrid":
        kinds = config.get("architectures") or []
        if "BailingMoeV3ForCausalLM" in kinds:
            outer = inner = "bailing_moe_v3"
    for candidate in (_OUTER_FIRST.get(str(outer)), inner, outer):
        name = _canonical(candidate)
        if name is not None:
            return name, Settings(name, text, config)
    raise UnknownGeometryError(f"no rule for the caches of model type {inner or outer!r}")


def _canonical(model_type: Any) -> str | None:
    if not isinstance(model_type, str):
        return None
    name = ALIASES.get(model_type, model_type)
    if name in RULES:
        return name
    for suffix in ("_text", "_language"):
        base = name.removesuffix(suffix)
        base = ALIASES.get(base, base)
        if base != name and base in RULES:
            return base
    return None


def _divide(size: int, parts: int) -> int:
    if not parts:
        raise UnknownGeometryError("config.json speaks of no attention heads")
    return size // parts


# --- families -------------------------------------------------------------------------------------


def _plain(c: Settings) -> list[Layer]:
    """Every layer keeps all keys and values."""
    return [(Attention(c.kv_heads, c.head_dim, c.head_dim),)] * c.layers


def _plain_derived(c: Settings) -> list[Layer]:
    """The same in classes that take the head size from the hidden size whatever ``head_dim``
    says."""
    return [(Attention(c.kv_heads, c.derived_head_dim, c.derived_head_dim),)] * c.layers


def _all_heads(c: Settings) -> list[Layer]:
    """No sharing of keys and values among heads."""
    return [(Attention(c.heads, c.derived_head_dim, c.derived_head_dim),)] * c.layers


def _plamo(c: Settings) -> list[Layer]:
    dim = c.derived_head_dim
    return [(Attention(_divide(c.heads, c.number("n_shared_head")), dim, dim),)] * c.layers


def _window(c: Settings, window: int, kv_heads: int | None = None, dim: int | None = None) -> Layer:
    dim = dim or c.head_dim
    return (Attention(kv_heads or c.kv_heads, dim, dim, "window", window),)


def _full(c: Settings) -> Layer:
    return (Attention(c.kv_heads, c.head_dim, c.head_dim),)


def _mixed(c: Settings, sliding: Iterable[bool], window_key: str = "sliding_window") -> list[Layer]:
    flags = list(sliding)
    if not any(flags):
        return [_full(c)] * len(flags)
    window = c.number(window_key)
    return [_window(c, window) if flag else _full(c) for flag in flags]


def _by_layer_types(default: str | None = None, other: str = "full") -> Rule:
    """Types in ``layer_types``. ``default``: the pattern where the config has none, one letter per
    layer and repeated (W window, F full). ``other``: what a type that is neither is taken for."""

    def rule(c: Settings) -> list[Layer]:
        types = c.sequence("layer_types", c.layers)
        if types is None:
            if default is None:
                return [_full(c)] * c.layers
            return _mixed(c, (default[i % len(default)] == "W" for i in range(c.layers)))
        types = types[: c.layers]
        if other == "window":
            return _mixed(c, (t != "full_attention" for t in types))
        return _mixed(c, (t == "sliding_attention" for t in types))

    return rule


def _every(c: Settings, key: str, window_key: str = "sliding_window") -> list[Layer]:
    """Each ``key``-th layer is full, the others have a window."""
    pattern = c.number(key)
    return _mixed(c, ((i + 1) % max(pattern, 1) != 0 for i in range(c.layers)), window_key)


def _gemma3(c: Settings) -> list[Layer]:
    name = "_sliding_window_pattern"
    if not c.has("sliding_window_pattern") and c.has(name):
        pattern = c.number(name)
        return _mixed(c, ((i + 1) % max(pattern, 1) != 0 for i in range(c.layers)))
    return _every(c, "sliding_window_pattern")


def _gemma3n(c: Settings) -> list[Layer]:
    """The last layers read the keys and values of earlier ones."""
    types = c.sequence("layer_types", c.layers)
    if types is None:
        types = (["sliding_attention"] * 4 + ["full_attention"]) * c.layers
    own = c.layers - c.number("num_kv_shared_layers")
    return _mixed(c, (t == "sliding_attention" for t in types[:own]))


def _gemma4(c: Settings) -> list[Layer]:
    types = c.sequence("layer_types", c.layers)
    if types is None:
        pattern = c.number("sliding_window_pattern")
        types = (["sliding_attention"] * (pattern - 1) + ["full_attention"]) * c.layers
    own = c.layers - c.number("num_kv_shared_layers")
    shared = c.get("attention_k_eq_v") and c.has("num_global_key_value_heads")
    heads = c.number("num_global_key_value_heads") if shared else c.kv_heads
    dim = c.number("global_head_dim") or c.head_dim
    full: Layer = (Attention(heads, dim, dim),)
    window = _window(c, c.number("sliding_window"))
    return [full if t == "full_attention" else window for t in types[:own]]


def _exaone4(c: Settings) -> list[Layer]:
    pattern = c.get("sliding_window_pattern")
    if isinstance(pattern, str) and pattern:
        return _mixed(c, (pattern[i % len(pattern)] == "L" for i in range(c.layers)))
    types = c.sequence("layer_types", c.layers)
    if types is None or pattern is not None:
        return [_full(c)] * c.layers
    return _mixed(c, (t == "sliding_attention" for t in types[: c.layers]))


def _mimo_v2(c: Settings) -> list[Layer]:
    pattern = c.sequence("hybrid_layer_pattern", c.layers) or []
    size = c.first_number("sliding_window_size", "sliding_window")
    heads, k, v = (
        c.number(n) for n in ("swa_num_key_value_heads", "swa_head_dim", "swa_v_head_dim")
    )
    window: Layer = (Attention(heads, k, v, "window", size),)
    full: Layer = (Attention(c.kv_heads, c.number("head_dim"), c.number("v_head_dim")),)
    return [window if flag == 1 else full for flag in pattern[: c.layers]]


def _step3p5(c: Settings) -> list[Layer]:
    types = c.sequence("layer_types", c.layers)
    dim = c.number("head_dim")
    heads = sliding_heads = c.number("num_attention_groups")
    if c.get("attention_other_setting"):
        sliding_heads = c.nested("attention_other_setting").number("num_attention_groups")
    window: Layer = (Attention(sliding_heads, dim, dim, "window", c.number("sliding_window")),)
    full: Layer = (Attention(heads, dim, dim),)
    flags = (
        [i % 2 == 0 for i in range(c.layers)]
        if not types
        else [t == "sliding_attention" for t in types[: c.layers]]
    )
    return [window if flag else full for flag in flags]


def _llama4(c: Settings) -> list[Layer]:
    chunk = c.number("attention_chunk_size")
    chunked: Layer = (Attention(c.kv_heads, c.head_dim, c.head_dim, "chunked", chunk),)
    return [chunked if (i + 1) % 4 else _full(c) for i in range(c.layers)]


def _loop_coder(c: Settings) -> list[Layer]:
    window = _window(c, c.number("loop_window_size"))
    return [_full(c)] * c.layers + [window] * c.layers


def _nanbeige(c: Settings) -> list[Layer]:
    return [_full(c)] * (c.layers * c.number("num_loops"))


# --- latent attention -----------------------------------------------------------------------------


def _latent_piece(c: Settings) -> Attention:
    return Attention(1, c.number("kv_lora_rank"), c.number("qk_rope_head_dim"), "latent")


def _latent(c: Settings) -> list[Layer]:
    return [(_latent_piece(c),)] * c.layers


def _expanded_latent(c: Settings) -> list[Layer]:
    """Latent attention whose class keeps the keys and values of all heads."""
    key = c.number("qk_nope_head_dim") + c.number("qk_rope_head_dim")
    value = c.derived_head_dim if c.model_type == "minicpm3" else c.number("v_head_dim")
    return [(Attention(c.heads, key, value),)] * c.layers


def _indexed_latent(c: Settings) -> list[Layer]:
    index = c.number("index_head_dim")
    return [(_latent_piece(c), Attention(1, index, index, "index"))] * c.layers


def _longcat(c: Settings) -> list[Layer]:
    layers: list[Layer] = [(_latent_piece(c), _latent_piece(c))] * c.first_number(
        "num_layers", "num_hidden_layers"
    )
    if c.model_type == "longcat_flash_ngram":
        # the last tokens, as 64-bit ids
        return [(State(raw_bytes=8 * (c.number("emb_neighbor_num") - 1)),), *layers]
    return layers


def _minimax_m3(c: Settings) -> list[Layer]:
    sparse = c.nested("sparse_attention_config") if c.get("sparse_attention_config") else c
    nested = sparse is not c
    block = sparse.get("sparse_block_size" if nested else "index_block_size")
    types = c.sequence("layer_types", c.layers)
    frequency = sparse.sequence("sparse_attention_freq", c.layers)
    layers: list[Layer] = []
    for i in range(c.layers):
        if block is None:
            indexed = False
        elif types is not None:
            indexed = types[i] != "full_attention"
        else:
            indexed = frequency is None or bool(frequency[i])
        if indexed:
            dim = sparse.number("sparse_index_dim" if nested else "index_head_dim")
            layers.append((*_full(c), Attention(1, dim, 0, "index")))
        else:
            layers.append(_full(c))
    return layers


# --- recurrences, convolutions, linear attention --------------------------------------------------


def _mamba1(inner: int, state: int, kernel: int) -> Layer:
    return (State(values=(kernel - 1) * inner + inner * state),)


def _mamba2_state(heads: int, dim: int, state: int, groups: int, kernel: int) -> State:
    inner = heads * dim
    return State(values=(kernel - 1) * (inner + 2 * groups * state), floats=inner * state)


def _mamba(c: Settings) -> list[Layer]:
    inner = c.first_number("intermediate_size", "d_inner")
    state = c.first_number("state_size", "d_state")
    kernel = c.first_number("conv_kernel", "d_conv")
    return [_mamba1(inner, state, kernel)] * c.first_number(
        "num_hidden_layers", "n_layer", "n_layers"
    )


def _mamba2(c: Settings) -> list[Layer]:
    names = ("num_heads", "head_dim", "state_size", "n_groups", "conv_kernel")
    return [(_mamba2_state(*(c.number(name) for name in names)),)] * c.layers


def _jamba(c: Settings) -> list[Layer]:
    types = c.sequence("layers_block_type", c.layers)
    if types is None:
        period, offset = c.number("attn_layer_period"), c.number("attn_layer_offset")
        types = ["attention" if i % max(period, 1) == offset else "mamba" for i in range(c.layers)]
    inner = c.number("mamba_expand") * c.number("hidden_size")
    mamba = _mamba1(inner, c.number("mamba_d_state"), c.number("mamba_d_conv"))
    full: Layer = (Attention(c.kv_heads, c.derived_head_dim, c.derived_head_dim),)
    return [full if t == "attention" else mamba for t in types[: c.layers]]


def _granite_hybrid(c: Settings) -> list[Layer]:
    types = c.sequence("layer_types", c.layers) or []
    full: Layer = (Attention(c.kv_heads, c.derived_head_dim, c.derived_head_dim),)
    if "mamba" not in types:
        return [full for t in types[: c.layers] if t == "attention"]
    names = ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv")
    mamba: Layer = (_mamba2_state(*(c.number(name) for name in names)),)
    return [mamba if t == "mamba" else full for t in types[: c.layers]]


def _falcon_h1(c: Settings) -> list[Layer]:
    inner, groups = c.number("mamba_d_ssm"), c.number("mamba_n_groups")
    state, kernel = c.number("mamba_d_state"), c.number("mamba_d_conv")
    floats = c.number("mamba_n_heads") * c.number("mamba_d_head") * state
    mamba = State(values=(kernel - 1) * (inner + 2 * groups * state), floats=floats)
    return [(mamba, *_full(c))] * c.layers


_NEMOTRON_BLOCKS = {
    "full_attention": "*",
    "attention": "*",
    "linear_attention": "M",
    "mamba": "M",
    "conv": "M",
    "moe": "E",
    "mlp": "-",
}


def _nemotron_h(c: Settings) -> list[Layer]:
    pattern = c.get("hybrid_override_pattern")
    if pattern is None:
        types = c.sequence("layers_block_type") or c.sequence("layer_types") or []
        pattern = [_NEMOTRON_BLOCKS.get(str(t), "?") for t in types]
    if not pattern or set(pattern) - set("*M-E"):
        raise UnknownGeometryError("config.json does not say what kind each layer is")
    names = ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel")
    mamba: Layer = ()
    if "M" in pattern:
        mamba = (_mamba2_state(*(c.number(name) for name in names)),)
    return [mamba if kind == "M" else _full(c) for kind in pattern if kind in "M*"]


def _nemotron_nas(c: Settings) -> list[Layer]:
    """Blocks without attention keep nothing, those with a linear layer in its place neither."""
    layers: list[Layer] = []
    for block in c.sequence("block_configs", c.layers) or []:
        attention = block.get("attention") if isinstance(block, Mapping) else None
        if not isinstance(attention, Mapping):
            raise UnknownGeometryError("config.json: block_configs does not describe attention")
        if attention.get("no_op") or attention.get("replace_with_linear"):
            continue
        heads = _divide(c.heads, attention.get("n_heads_in_group") or 0)
        layers.append((Attention(heads, c.derived_head_dim, c.derived_head_dim),))
    return layers


def _plamo2(c: Settings) -> list[Layer]:
    dim = c.number("hidden_size_per_head")
    full: Layer = (Attention(c.kv_heads, dim, dim),)
    if not c.get("mamba_enabled"):
        return [full] * c.layers
    inner = c.number("mamba_num_heads") * dim
    state = c.number("mamba_d_state")
    conv = (c.number("mamba_d_conv") - 1) * inner
    mamba: Layer = (State(values=conv, floats=inner * state),)
    step = max(c.number("mamba_step"), 1)
    if c.layers <= step // 2:
        return [mamba if i != c.layers - 1 else full for i in range(c.layers)]
    return [full if i % step == step // 2 else mamba for i in range(c.layers)]


def _delta_net(c: Settings, full: Rule, interval: int) -> list[Layer]:
    """Gated delta rule: one convolution over queries, keys and values together."""
    keys, values = c.number("linear_num_key_heads"), c.number("linear_num_value_heads")
    key_dim, value_dim = c.number("linear_key_head_dim"), c.number("linear_value_head_dim")
    conv = (c.number("linear_conv_kernel_dim") - 1) * (2 * keys * key_dim + values * value_dim)
    linear: Layer = (State(values=conv, floats=values * value_dim * key_dim),)
    whole = next(iter(full(c)))
    return [linear if (i + 1) % max(interval, 1) else whole for i in range(c.layers)]


def _qwen3_next(c: Settings) -> list[Layer]:
    return _delta_net(c, _plain, c.number("full_attention_interval"))


def _olmo_hybrid(c: Settings) -> list[Layer]:
    types = c.sequence("layer_types", c.layers)
    if types is None:
        types = (["linear_attention"] * 3 + ["full_attention"]) * c.layers
    heads, value_heads = c.number("linear_num_key_heads"), c.number("linear_num_value_heads")
    key_dim, value_dim = c.number("linear_key_head_dim"), c.number("linear_value_head_dim")
    conv = (c.number("linear_conv_kernel_dim") - 1) * (
        2 * heads * key_dim + value_heads * value_dim
    )
    linear: Layer = (State(values=conv, floats=value_heads * value_dim * key_dim),)
    return [linear if t == "linear_attention" else _full(c) for t in types[: c.layers]]


def _kimi_linear(c: Settings) -> list[Layer]:
    linear_config = c.nested("linear_attn_config")
    kda = set(linear_config.sequence("kda_layers") or [])
    heads, dim = linear_config.number("num_heads"), linear_config.number("head_dim")
    kernel = linear_config.number("short_conv_kernel_size", 4)
    linear: Layer = (State(3 * (kernel - 1) * heads * dim, heads * dim * dim),)
    return [linear if i + 1 in kda else (_latent_piece(c),) for i in range(c.layers)]


def _grouped_global(c: Settings) -> list[bool]:
    """The last layer of every group, and those behind the last whole group."""
    group = max(c.number("layer_group_size"), 1)
    whole = c.layers // group * group
    return [(i + 1) % group == 0 or i >= whole for i in range(c.layers)]


def _bailing_hybrid(c: Settings) -> list[Layer]:
    linear: Layer = (State(floats=c.heads * c.head_dim * c.head_dim),)
    return [(_latent_piece(c),) if flag else linear for flag in _grouped_global(c)]


def _bailing_linear(c: Settings) -> list[Layer]:
    dim = c.derived_head_dim
    linear: Layer = (State(values=c.heads * dim * dim),)
    full: Layer = (Attention(c.kv_heads, c.head_dim, c.head_dim),)
    return [full if flag else linear for flag in _grouped_global(c)]


def _bailing_v3(c: Settings) -> list[Layer]:
    dim, kernel = c.head_dim, c.number("short_conv_kernel_size")
    linear: Layer = (State(3 * (kernel - 1) * c.heads * dim, c.heads * dim * dim),)
    return [(_latent_piece(c),) if flag else linear for flag in _grouped_global(c)]


def _lfm2(c: Settings) -> list[Layer]:
    full_layers = c.sequence("full_attn_idxs")
    if full_layers is None:
        types = c.sequence("layer_types", c.layers)
        if types is None:
            raise UnknownGeometryError("config.json has no layer_types")
        full_layers = [i for i, t in enumerate(types) if t == "full_attention"]
    conv: Layer = (State(values=(c.number("conv_L_cache") - 1) * c.number("hidden_size")),)
    full: Layer = (Attention(c.kv_heads, c.derived_head_dim, c.derived_head_dim),)
    return [full if i in full_layers else conv for i in range(c.layers)]


def _baichuan_m1(c: Settings) -> list[Layer]:
    """Each layer keeps the last key and value besides, for a convolution of two taps."""
    sliding = set(c.sequence("sliding_window_layers") or [])
    dim, kv_heads = c.derived_head_dim, c.kv_heads
    layers: list[Layer] = []
    for i in range(c.layers):
        if i in sliding:
            own = _divide(c.number("hidden_size"), c.number("num_swa_attention_heads", c.heads))
            heads = c.number("num_swa_key_value_heads", kv_heads)
            window = Attention(heads, own, own, "window", c.number("sliding_window"))
            layers.append((State(values=2 * heads * own), window))
        else:
            layers.append((State(values=2 * kv_heads * dim), Attention(kv_heads, dim, dim)))
    return layers


def _recurrent_gemma(c: Settings) -> list[Layer]:
    blocks = c.sequence("block_types") or c.sequence("_block_types")
    if not blocks:
        raise UnknownGeometryError("config.json has no block_types")
    width, dim = c.number("hidden_size"), c.derived_head_dim
    recurrent: Layer = (State(values=(c.number("conv1d_width") - 1) * width + width),)
    attention: Layer = (Attention(1, dim, dim, "window", c.number("attention_window_size")),)
    return [
        recurrent if blocks[i % len(blocks)] == "recurrent" else attention for i in range(c.layers)
    ]


def _rwkv7(c: Settings) -> list[Layer]:
    width = c.number("hidden_size")
    return [(State(values=2 * width + width * c.number("head_dim")),)] * c.layers


# --- types with names of their own for everything -------------------------------------------------


def _gpt2(c: Settings) -> list[Layer]:
    dim = _divide(c.number("n_embd"), c.number("n_head"))
    return [(Attention(c.number("n_head"), dim, dim),)] * c.number("n_layer")


def _gpt_bigcode(c: Settings) -> list[Layer]:
    dim = _divide(c.number("n_embd"), c.number("n_head"))
    heads = 1 if c.get("multi_query") else c.number("n_head")
    return [(Attention(heads, dim, dim),)] * c.number("n_layer")


def _lille(c: Settings) -> list[Layer]:
    dim = _divide(c.number("n_embd"), c.number("n_head"))
    return [(Attention(c.number("n_kv_heads"), dim, dim),)] * c.number("n_layer")


def _dbrx(c: Settings) -> list[Layer]:
    dim = _divide(c.number("d_model"), c.number("n_heads"))
    heads = c.nested("attn_config").number("kv_n_heads")
    return [(Attention(heads, dim, dim),)] * c.number("n_layers")


def _openelm(c: Settings) -> list[Layer]:
    dim, number = c.number("head_dim"), c.number("num_transformer_layers")
    heads = c.sequence("num_kv_heads", number) or []
    return [(Attention(n, dim, dim),) for n in heads[:number]]


def _phixtral(c: Settings) -> list[Layer]:
    dim = _divide(c.number("model_dim"), c.number("num_heads"))
    return [(Attention(c.number("num_heads"), dim, dim),)] * c.number("num_layers")


def _qwen1(c: Settings) -> list[Layer]:
    dim = c.number("kv_channels")
    return [(Attention(c.heads, dim, dim),)] * c.layers


def _talkie(c: Settings) -> list[Layer]:
    return [(Attention(c.heads, c.head_dim, c.head_dim),)] * c.layers


def _exaone(c: Settings) -> list[Layer]:
    return [_full(c)] * c.number("num_layers")


def _afm7(c: Settings) -> list[Layer]:
    """The last layers read the keys and values of an earlier one."""
    dim = _divide(c.number("hidden_dim"), c.number("num_heads"))
    own = c.number("num_layers") - c.number("num_kv_reuse_layers")
    return [(Attention(c.number("num_kv_heads"), dim, dim),)] * own


def _family(rule: Rule, names: str) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


RULES: dict[str, Rule] = {
    **_family(
        _plain,
        "bitnet dots1 ernie4_5 ernie4_5_moe gemma gemma2 glm glm4 glm4_moe "
        "hunyuan_v1_dense llama4_text minimax nemotron olmo2 olmoe qwen3 qwen3_moe seed_oss "
        "smollm3 solar_open telechat3",
    ),
    **_family(
        _plain_derived,
        "Klear apertus bailing_moe cohere deepseek granite granitemoe helium hunyuan internlm2 "
        "internlm3 mimo minicpm mixtral nanochat phi phi3 phi3small phimoe qwen2 qwen2_moe "
        "stablelm starcoder2",
    ),
    "gpt_neox": _all_heads,
    "plamo": _plamo,
    **_family(_by_layer_types(), "llama ministral3 laguna afmoe exaone_moe"),
    **_family(_by_layer_types("WWWF"), "spark2_5 muse_glimmer muse_spark"),
    **_family(_by_layer_types("WWWF", "window"), "olmo3"),
    **_family(_by_layer_types("WF", "window"), "gpt_oss"),
    **_family(_by_layer_types(None, "window"), "mellum"),
    "cohere2": lambda c: _every(c, "sliding_window_pattern"),
    "plamo3": lambda c: _every(
        c,
        "sliding_window_pattern",
        "sliding_window" if c.has("sliding_window") else "window_size",
    ),
    **_family(_gemma3, "gemma3 gemma3_text"),
    "gemma3n": _gemma3n,
    "gemma4_text": _gemma4,
    "exaone4": _exaone4,
    "mimo_v2_flash": _mimo_v2,
    "step3p5": _step3p5,
    "llama4": _llama4,
    "iquestloopcoder": _loop_coder,
    "nanbeige": _nanbeige,
    **_family(_latent, "deepseek_v3 glm4_moe_lite mistral4 kimi_vl kimi_k25"),
    **_family(_expanded_latent, "deepseek_v2 minicpm3 youtu_llm"),
    **_family(_indexed_latent, "deepseek_v32 glm_moe_dsa"),
    **_family(_longcat, "longcat_flash longcat_flash_ngram"),
    "minimax_m3_vl": _minimax_m3,
    "mamba": _mamba,
    "mamba2": _mamba2,
    "jamba": _jamba,
    "granitemoehybrid": _granite_hybrid,
    "falcon_h1": _falcon_h1,
    "nemotron_h": _nemotron_h,
    "nemotron-nas": _nemotron_nas,
    "plamo2": _plamo2,
    **_family(_qwen3_next, "qwen3_next qwen3_5 qwen3_5_moe"),
    "olmo_hybrid": _olmo_hybrid,
    **_family(_kimi_linear, "kimi_linear kimi_k3"),
    "bailing_hybrid": _bailing_hybrid,
    "bailing_moe_linear": _bailing_linear,
    "bailing_moe_v3": _bailing_v3,
    **_family(_lfm2, "lfm2 lfm2_moe"),
    "baichuan_m1": _baichuan_m1,
    "recurrent_gemma": _recurrent_gemma,
    "rwkv7": _rwkv7,
    **_family(_gpt2, "gpt2 gptj"),
    "gpt_bigcode": _gpt_bigcode,
    "lille-130m": _lille,
    "dbrx": _dbrx,
    "openelm": _openelm,
    "phixtral": _phixtral,
    "qwen": _qwen1,
    "talkie": _talkie,
    "exaone": _exaone,
    "afm7": _afm7,
}
"""Model type -> rule, under the names of mlx-lm's modules."""

ALIASES: dict[str, str] = {
    # what mlx-lm itself loads with another type's class
    "mistral": "llama",
    "phi-msft": "phixtral",
    "falcon_mamba": "mamba",
    "joyai_llm_flash": "deepseek_v3",
    "kimi_k2": "deepseek_v3",
    "minimax_m2": "minimax",
    "iquestcoder": "llama",
    "xverse": "llama",
    # language models inside of others
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_text",
    "lfm2-vl": "lfm2",
    "lfm2_vl": "lfm2",
    "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
    "qwen3_omni_moe": "qwen3_moe",
    "glm4v": "glm4",
    "glm4v_moe": "glm4_moe",
    "mistral3": "llama",
    "pixtral": "llama",
    "llava": "llama",
    "llava_next": "llama",
    "idefics3": "llama",
    "smolvlm": "llama",
    "minimax_m3": "minimax_m3_vl",
    "ernie4_5_moe_vl": "ernie4_5_moe",
    "paligemma": "gemma2",
    "granitemoeshared": "granitemoe",
}

# Here the wrapper decides and not the type of the text inside it.
_OUTER_FIRST = {
    "gemma3": "gemma3",
    "llama4": "llama4",
    "kimi_vl": "kimi_vl",
    "kimi_k25": "kimi_k25",
}
_OUTER_FIRST |= {"kimi_k3": "kimi_k3", "muse_spark": "muse_spark"}
_OUTER_FIRST |= {"minimax_m3_vl": "minimax_m3_vl", "minimax_m3": "minimax_m3_vl"}
