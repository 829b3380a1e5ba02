"""Fused training kernels for large language models, as PyTorch operators for `torch.compile`.

Every op is `torch.ops.liger.<op>` and, with its documentation, `liger_ops.<op>`.
"""

from typing import TYPE_CHECKING, Any

from .ascend import autoload
from . import checkout, library
from .device import infer_device
from .invariance import invariant
from .ops.norms.rms_norm import rms_norm
from .ops.norms.fused_add_rms_norm import fused_add_rms_norm
from .ops.norms.gated_rms_norm import gated_rms_norm
from .ops.norms.layer_norm import layer_norm
from .ops.norms.modulated_rms_norm import modulated_rms_norm
from .ops.norms.modulated_layer_norm import modulated_layer_norm
from .ops.norms.group_norm import group_norm
from .ops.hyper_connections.mhc_coeffs import mhc_coeffs, mhc_coeffs_forward
from .ops.hyper_connections.mhc_pre import mhc_pre
from .ops.hyper_connections.mhc_post_res import mhc_post_res
from .ops.norms.dyt import dyt
from .ops.norms.poly_norm import poly_norm
from .ops.activations.swiglu import swiglu
from .ops.activations.clamped_swiglu import clamped_swiglu
from .ops.activations.geglu import geglu
from .ops.activations.relu_squared import relu_squared
from .ops.softmax.softmax import softmax
from .ops.softmax.log_softmax import log_softmax
from .ops.softmax.sparsemax import sparsemax, sparsemax_forward
from .ops.rope.rope import rope
from .ops.rope.rms_norm_rope import rms_norm_rope
from .ops.embedding import embedding
from .ops.attention.attn_res import attn_res
from .ops.activations.tiled_mlp import tiled_mlp, tiled_mlp_forward
from .ops.lora_linear import lora_linear, lora_linear_forward
from .ops.experts.moe_experts import moe_experts, moe_experts_forward
from .ops.attention.neighborhood_attention import (
    neighborhood_attention,
    neighborhood_attention_forward,
)
from .ops.attention import packed_documents
from .ops.attention.varlen_attention import varlen_attention, varlen_attention_forward
from .ops.attention.multi_token_attention import (
    multi_token_attention,
    multi_token_attention_forward,
)
from .ops.losses.cross_entropy import cross_entropy, cross_entropy_forward
from .ops.heads.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_forward
from .ops.losses.kl_div import kl_div
from .ops.losses.jsd import jsd
from .ops.losses.tvd import tvd
from .ops.losses.divergence import divergence, divergence_forward
from .ops.losses.log_prob import log_prob, log_prob_forward
from .ops.losses.router_losses import router_losses, router_losses_forward
from .ops.heads.linear_divergence import linear_divergence, linear_divergence_forward
from .ops.heads.linear_log_prob import linear_log_prob, linear_log_prob_forward
from .ops.heads.linear_score_centering import (
    linear_score_centering,
    linear_score_centering_forward,
)
from .ops.heads.linear_top_k import linear_top_k, linear_top_k_forward
from .ops.heads.linear_top_k_divergence import (
    linear_top_k_divergence,
    linear_top_k_divergence_forward,
)
from . import meta, lowering
from . import losses, nn
from . import distributed
from .compile_cache import tag_compile_caches
from .decompositions import count_flops, decompositions, export_to_onnx
from .inductor import register_with_inductor

__version__ = "0.2.0"

tag_compile_caches()
count_flops()
register_with_inductor()
export_to_onnx()

if TYPE_CHECKING:
    from . import fusion
    from .fusion import fuse, unfuse
    from .rewrites.backend import liger as backend
    from .rewrites.enable import disable, enable
    from .rewrites.explain import explain
    from .rewrites.enable import graph_pass

__all__ = [
    "attn_res", "backend", "clamped_swiglu", "cross_entropy", "cross_entropy_forward",
    "decompositions", "disable", "distributed", "divergence", "divergence_forward", "dyt",
    "embedding", "enable", "explain", "fuse", "fused_add_rms_norm", "fusion", "gated_rms_norm",
    "geglu", "graph_pass", "group_norm", "infer_device", "invariant", "jsd", "kl_div", "layer_norm",
    "linear_cross_entropy", "linear_cross_entropy_forward", "linear_divergence",
    "linear_divergence_forward", "linear_log_prob", "linear_log_prob_forward",
    "linear_score_centering", "linear_score_centering_forward", "linear_top_k",
    "linear_top_k_divergence", "linear_top_k_divergence_forward", "linear_top_k_forward",
    "log_prob", "log_prob_forward", "log_softmax", "lora_linear", "lora_linear_forward",
    "losses", "mhc_coeffs", "mhc_coeffs_forward", "mhc_post_res", "mhc_pre",
    "modulated_layer_norm", "modulated_rms_norm", "moe_experts", "moe_experts_forward",
    "multi_token_attention", "multi_token_attention_forward", "neighborhood_attention",
    "neighborhood_attention_forward", "nn", "poly_norm", "relu_squared", "rms_norm",
    "rms_norm_rope", "rope", "router_losses", "router_losses_forward", "softmax", "sparsemax",
    "sparsemax_forward", "swiglu", "tiled_mlp", "tiled_mlp_forward", "tvd", "unfuse",
    "varlen_attention", "varlen_attention_forward",
]  # fmt: skip

# Names that load Dynamo: they are imported at first use.
_COMPILER = {
    "backend": "rewrites.backend:liger",
    "disable": "rewrites.enable:disable",
    "enable": "rewrites.enable:enable",
    "explain": "rewrites.explain:explain",
    "fuse": "fusion:fuse",
    "fusion": "fusion",
    "graph_pass": "rewrites.enable:graph_pass",
    "unfuse": "fusion:unfuse",
}


def __getattr__(name: str) -> Any:
    if name not in _COMPILER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pkgutil import resolve_name

    return resolve_name(f"{__name__}.{_COMPILER[name]}")
