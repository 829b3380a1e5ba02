"""The contents of a repository for the kernels hub: layers, experts, and the ops that they call.

It is the first import of such a repository. It registers the ops, as `liger_ops/__init__.py` does
for all of them, and is not imported in liger_ops.
"""

from __future__ import annotations

from .. import library, ops

library.import_modules(ops.__name__, ops.__path__)

# They register the fakes and kernels of the ops above.
from .. import lowering, meta  # noqa: E402, F401
from ..inductor import register_with_inductor  # noqa: E402
from ..ops.activations.geglu import geglu  # noqa: E402
from ..ops.activations.swiglu import swiglu  # noqa: E402
from ..ops.attention.varlen_attention import varlen_attention  # noqa: E402
from ..ops.experts.moe_experts import moe_experts  # noqa: E402
from ..ops.losses.cross_entropy import cross_entropy  # noqa: E402
from ..ops.norms.gated_rms_norm import gated_rms_norm  # noqa: E402
from ..ops.norms.rms_norm import rms_norm  # noqa: E402
from ..ops.rope.rope import rope  # noqa: E402
from . import layers  # noqa: E402
from .attention import attention, attention_mask  # noqa: E402
from .experts import experts_forward  # noqa: E402

register_with_inductor()

__all__ = [
    "attention", "attention_mask", "cross_entropy", "experts_forward", "gated_rms_norm", "geglu",
    "layers", "moe_experts", "rms_norm", "rope", "swiglu", "varlen_attention",
]  # fmt: skip
