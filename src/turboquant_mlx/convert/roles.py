"""What a module is for, read from its path in the mlx-lm (or mlx-vlm) model.

Module names are the only thing that all architectures have in common, so the vocabulary below
was collected from every model file of mlx-lm 0.32 and the mixture-of-experts models of mlx-vlm
0.7. Tests hold it against the real classes: which weights have one output per expert, and which
modules of a block really receive the same array. No MLX here.
"""

from __future__ import annotations

import re
from typing import Literal

Role = Literal["attention", "mlp", "expert", "lm_head", "embedding", "router", "norm", "other"]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# As a container too: mlp.gate.wg, mlp.router.classifier, self_attn.indexer.wq_b ...
_ROUTER = re.compile(r"gate(_\d+)?|router|\w+_router|shared_expert_gate|indexer")
# Block selection of sparse attention where the model has no indexer module of its own.
_INDEXER = re.compile(r"index_\w+|weights_proj")

# Everything that mixes tokens counts as attention: softmax, linear and latent attention, and the
# state-space, convolution and recurrent blocks that take its place in hybrid models.
_ATTENTION = _names(
    "self_attn self_attention attention attn linear_attn cross_attn mixer local_mixer mamba conv "
    "temporal_block"
)
_MLP = _names(
    "mlp mlps mlp_block shared_mlp feed_forward ffn moe block_sparse_moe switch_mlp experts "
    "shared_expert shared_experts share_expert"
)
# nemotron_h calls every block "mixer", its MLPs included.
_MLP_IN_MIXER = _names("gate_proj up_proj down_proj fc1_latent_proj fc2_latent_proj")
_HEADS_AT_TOP = _names("output embed_out")

EXPERT_DOWN = _names("down_proj w2 fc2 output_linear")
"""Last components of the projection that closes an expert."""

_READS_BLOCK_INPUT = _names(
    # attention, latent attention, linear attention
    "q_proj k_proj v_proj g_proj gate_proj qkv_proj query_key_value c_q c_k c_v "
    "attn_query attn_key attn_value q_a_proj kv_a_proj_with_mqa kv_proj a_proj b_proj f_proj "
    "f_a_proj g_a_proj in_proj_qkv in_proj_z in_proj_b in_proj_a in_proj_qkvz in_proj_ba "
    "linear_x linear_y "
    # MLPs and experts
    "up_proj w1 w3 v1 c_fc_0 c_fc_1 mlp_gate mlp_linear"
)


def is_router(path: str) -> bool:
    """Whether this module chooses experts or blocks: a small error there changes the choice.

    ``mlp.gate``, ``mlp.gate.gate_proj`` and ``router.layer`` are routers; the ``gate_proj`` and
    ``gate_up_proj`` of an MLP or of an expert stack are not.
    """
    *containers, last = path.split(".")
    if any(_ROUTER.fullmatch(name) for name in (*containers, last)):
        return True
    return _INDEXER.fullmatch(last) is not None


def role_of(path: str, kind: str) -> Role:
    """What the module at ``path`` does.

    Args:
        path: module path, for example ``model.layers.0.self_attn.q_proj``.
        kind: "linear", "switch", "embedding", "multi_linear", "conv" or "other".

    Returns:
        the role. "expert" means a routed expert; shared experts are "mlp".
    """
    parts = path.split(".")
    last = parts[-1]
    if is_router(path):
        return "router"
    if kind == "embedding":
        return "embedding"
    if "lm_head" in parts or (last in _HEADS_AT_TOP and layer_of(path) is None):
        return "lm_head"
    if kind == "other":
        # Lists of norms end in a number.
        name = next((part for part in reversed(parts) if not part.isdigit()), last)
        if "norm" in name or name.startswith("ln"):
            return "norm"
    block = next((p for p in reversed(parts[:-1]) if p in _ATTENTION or p in _MLP), None)
    if block in _ATTENTION:
        # A stack of matrices in attention (deepseek_v41's o_a_proj) holds no experts.
        return "mlp" if block == "mixer" and last in _MLP_IN_MIXER else "attention"
    if kind == "switch" or "experts" in parts:
        return "expert"
    return "mlp" if block in _MLP else "other"


def layer_of(path: str) -> int | None:
    """The decoder layer that a module belongs to: the first number in its path."""
    return next((int(part) for part in path.split(".") if part.isdigit()), None)


def reads_block_input(path: str, siblings: frozenset[str]) -> bool:
    """Whether a module multiplies the very array that its parent was called with.

    Such modules of one parent can share one rotation of it.

    Args:
        path: module path.
        siblings: last components of all modules of the same parent.
    """
    last = path.rpartition(".")[2]
    if "r_proj" in siblings:
        # rwkv7 shifts the tokens separately for each of its projections.
        return False
    if last == "w2" and "c_proj" in siblings:
        # The first Qwen: w1 and w2 open the MLP, c_proj closes it.
        return True
    return last in _READS_BLOCK_INPUT
