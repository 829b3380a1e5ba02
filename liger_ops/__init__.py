"""Fused training kernels for large language models, as operators that `torch.compile` sees.

Every op is `torch.ops.liger.<op>` and, with its documentation, `liger_ops.<op>`.
"""

from typing import TYPE_CHECKING, Any

from . import library
from .device import infer_device
from .ops.rms_norm import rms_norm
from .ops.fused_add_rms_norm import fused_add_rms_norm
from .ops.layer_norm import layer_norm
from .ops.group_norm import group_norm
from .ops.swiglu import swiglu
from .ops.clamped_swiglu import clamped_swiglu
from .ops.geglu import geglu
from .ops.relu_squared import relu_squared
from .ops.softmax import softmax
from .ops.log_softmax import log_softmax
from .ops.rope import rope
from .ops.cross_entropy import cross_entropy, cross_entropy_forward
from .ops.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_forward
from . import meta, lowering
from . import nn
from .fusion import fuse, unfuse
from .compile_cache import tag_compile_caches

__version__ = "0.1.0"

tag_compile_caches()

if TYPE_CHECKING:
    from .lowering.passes.backend import liger as backend
    from .lowering.passes.enable import disable, enable
    from .lowering.passes.explain import explain
    from .lowering.passes.graph_pass import graph_pass

# Where the names are that load Dynamo: importing liger_ops does not.
_COMPILER = {
    "backend": ("backend", "liger"),
    "disable": ("enable", "disable"),
    "enable": ("enable", "enable"),
    "explain": ("explain", "explain"),
    "graph_pass": ("graph_pass", "graph_pass"),
}


def __getattr__(name: str) -> Any:
    if name not in _COMPILER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module, attribute = _COMPILER[name]
    return getattr(import_module(f"{__name__}.lowering.passes.{module}"), attribute)
