"""Rules of models that keep a latent in the place of keys and values, or index keys beside them."""

from __future__ import annotations

from ..pieces import Attention, Layer, State, UnknownGeometryError
from .attention import full_layer
from .settings import Settings


def latent_piece(c: Settings) -> Attention:
    return Attention(1, c.number("kv_lora_rank"), c.number("qk_rope_head_dim"), "latent")


def latent(c: Settings) -> list[Layer]:
    return [(latent_piece(c),)] * c.layers


def expanded_latent(c: Settings) -> list[Layer]:
    """Latent attention whose class keeps the keys and values of all heads."""
    key = c.number("qk_nope_head_dim") + c.number("qk_rope_head_dim")
    value = c.derived_head_dim if c.model_type == "minicpm3" else c.number("v_head_dim")
    return [(Attention(c.heads, key, value),)] * c.layers


def indexed_latent(c: Settings) -> list[Layer]:
    index = c.number("index_head_dim")
    return [(latent_piece(c), Attention(1, index, index, "index"))] * c.layers


def longcat(c: Settings) -> list[Layer]:
    layers: list[Layer] = [(latent_piece(c), latent_piece(c))] * c.first_number(
        "num_layers", "num_hidden_layers"
    )
    if c.model_type == "longcat_flash_ngram":
        # the last tokens, as 64-bit ids
        return [(State(raw_bytes=8 * (c.number("emb_neighbor_num") - 1)),), *layers]
    return layers


def minimax_m3(c: Settings) -> list[Layer]:
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
            layers.append((*full_layer(c), Attention(1, dim, 0, "index")))
        else:
            layers.append(full_layer(c))
    return layers


def deepseek_v41(c: Settings) -> list[Layer]:
    """A window of one vector per token, which is key and value at once. Source layers keep vectors
    that stand for ``compress_ratios`` tokens each, and index keys, for the layers after them too.
    Nothing grows in steps: each token's arrays are made anew."""
    dim, index = c.number("head_dim"), c.number("index_head_dim")
    ratios = c.sequence("compress_ratios") or []
    keeps = set(c.sequence("kv_source_layer_ids") or [])
    indexes = set(c.sequence("index_source_layer_ids") or [])
    window = Attention(1, dim, 0, "window", c.number("sliding_window"), step=1)
    layers: list[Layer] = []
    for i in range(c.layers):
        ratio = ratios[i] if i < len(ratios) else 0
        if isinstance(ratio, bool) or not isinstance(ratio, int) or not 0 <= ratio < 1 << 20:
            raise UnknownGeometryError(f"config.json: compress ratio {ratio!r} is not a size")
        layer = [window]
        if ratio and i in keeps:
            waiting = 2 * dim if ratio > 1 else 0
            layer.append(
                Attention(1, dim, 0, "compressed", ratio=ratio, step=1, open_floats=waiting)
            )
            if i in indexes:
                layer.append(Attention(1, index, 0, "index", ratio=ratio, step=1))
        layers.append(tuple(layer))
    return layers
