"""Replace parts of a model by fused ops, and undo it.

Each fuser handles one kind of part, which it recognises by what it computes. It first plans what it
will change in a model, and what it will leave; then all changes are made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ..rewrites.engine.pattern import torch_linear
from . import loss as losses
from .attention import attention as attentions
from .layers.experts.experts import Experts
from .layers.experts.router_losses import RouterLossFunctions
from .layers.gated import GatedMLPs
from .layers.hyper_connections import HyperConnections
from .layers.norms import Norms
from .layers.rotary import Rotary
from .lora import linear as lora_layers
from .other_models import not_looked_for
from .planning import FusionPlan, wholly_or_not_at_all
from .report import Finding, FuseReport
from .unfused import check_module, unfuse, verified
from .unknown_arguments import explain_unknown_keywords

# Switch -> the functions that plan the changes of a model.
PLANS: dict[str, tuple[Callable[[nn.Module], FusionPlan], ...]] = {
    "norms": (Norms.plan,),
    "activations": (GatedMLPs.plan, Experts.plan),
    "rope": (Rotary.plan,),
    "attention": (attentions.plan,),
    "hyper_connections": (HyperConnections.plan,),
    "lora": (lora_layers.plan,),
    # The loss with the head is fused last: its forward calls those of the other kinds.
    "loss": (RouterLossFunctions.plan,),
}
# Switch -> the kind in its findings, where that has another name.
KINDS = {"rope": Rotary.title}

__all__ = ["Finding", "FuseReport", "fuse", "unfuse"]


@explain_unknown_keywords
def fuse(
    model: nn.Module, *, norms: bool = True, activations: bool = True,
    rope: bool = True, attention: bool = True, loss: bool = True, hyper_connections: bool = True,
    lora: bool = False, verify: Any = None,
) -> FuseReport:  # fmt: skip
    """Make a model compute its norms, activations, experts, rotary embeddings, hyper-connections,
    LoRA layers and losses with the ops, and its attention with PyTorch's fastest exact engine.

    A part is recognised by what it computes, not by its class: its code is traced, and matched
    against the patterns of the backend `liger`. The class of each fused module becomes a subclass
    with one method overridden. Parameters, names, hooks and the state dict stay. A part whose
    results could change is left, and the report says why. A module whose attributes, children or
    dtypes change later runs its own code. A second call changes nothing.

    In training with labels the model returns the loss and no logits, unless its forward is given
    `skip_logits=False`; the forward also takes options of `linear_cross_entropy`. docs/fuse.md
    describes each kind, those options, what is left, and the changes that are allowed later.

    Args:
        model: a transformers model, or any module. It is changed in place, and not at all if an
            exception is raised.
        norms, rope: whether to fuse norms; and rotary embeddings.
        activations: whether to fuse gated activations, and experts of mixture models.
        attention: whether to register and use mask and attention functions in transformers.
        loss: whether to fuse the loss with the head, and the load-balancing loss of routers.
        hyper_connections: whether to fuse hyper-connections.
        lora: whether to fuse LoRA layers of peft. It saves memory, but takes more time on the host.
        verify: a batch: a dictionary of the arguments of a call, a tuple of them, or the only one.
            A training step on it must agree with that of the unfused model.

    Returns:
        A FuseReport: `fused` and `left` are findings, each with the module's name (`where`), `kind`
        and `op` or `reason`; `counts()` is the number per op. `print` shows a table.

    Raises:
        TypeError: model, a switch or verify has a wrong type, or an argument is unknown.
        ValueError: with `verify`, the fused model differs, or cannot be compared.

    Example:
        >>> print(liger_ops.fuse(torch.nn.Sequential(torch.nn.LayerNorm(8))))
        1 op used
          1 x layer_norm(eps=1e-05): LayerNorm
              0
          Nothing is faster on cpu, where there are no kernels.
    """
    check_module("fuse", model)
    switches = {
        "norms": norms,
        "activations": activations,
        "rope": rope,
        "attention": attention,
        "loss": loss,
        "hyper_connections": hyper_connections,
        "lora": lora,
    }
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise TypeError(f"fuse: {name} must be True or False, got {value!r}")
    if isinstance(verify, bool):
        raise TypeError(
            "fuse: verify must be a batch: a dictionary of the arguments of a call, a tuple of"
            f" them, or the only one, got {verify}. explain(model, **batch, verify=True) compares a"
            " model that is already fused"
        )
    with wholly_or_not_at_all(model), attentions.names_kept_on_error(model):
        with torch_linear():
            plans = [plan(model) for name, some in PLANS.items() for plan in some if switches[name]]
            findings = [finding for plan in plans for finding in plan.findings]
            for plan in plans:
                for change in plan.changes:
                    change()
            if loss:
                findings += losses.fuse(model).findings
        kinds = tuple(name for name, wanted in switches.items() if wanted)
        findings += not_looked_for(model, [KINDS.get(kind, kind) for kind in kinds], findings)
        verification = None if verify is None else verified(model, verify)
    device = next((parameter.device.type for parameter in model.parameters()), "")
    return FuseReport(tuple(findings), kinds, verification, device)
