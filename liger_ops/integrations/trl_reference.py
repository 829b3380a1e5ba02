"""The reference models of TRL's trainers, fused as the policies are.

A trainer of preferences compares the log-probabilities of a policy and of a reference, which are
equal models at first. If only the policy is fused, the two round differently, and the first loss of
DPO is not log 2.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from torch import nn

from ..fusion import classes, fuse
from ..fusion.attention import attention
from ..fusion.layers.experts.experts import Experts
from ..fusion.layers.gated import GatedMLPs
from ..fusion.layers.hyper_connections import HyperConnections
from ..fusion.layers.modulated_norms import ModulatedNorms
from ..fusion.layers.norms import FUSED_CLASSES, Norms
from ..fusion.layers.rotary import Rotary
from .replaced import Replaced

# The trainers with a reference model, and the function by which they load it.
TRAINERS = {"dpo": "DPOTrainer", "kto": "KTOTrainer", "grpo": "GRPOTrainer", "rloo": "RLOOTrainer"}
CREATE = "create_model_from_path"

# The policy of the trainer that is being constructed, in this context.
_policy: ContextVar[Any] = ContextVar("policy", default=None)


def install(replaced: Replaced) -> None:
    """Let trainers fuse the reference model that they load in the parts in which the policy is."""
    for name, trainer in TRAINERS.items():
        try:
            module = importlib.import_module(f"trl.trainer.{name}_trainer")
        except ImportError:
            continue
        cls = getattr(module, trainer, None)
        if cls is not None and hasattr(module, CREATE):
            replaced.set(module, CREATE, _fusing_like_policy(getattr(module, CREATE)))
            replaced.set(cls, "__init__", _recording_policy(cls.__init__))


def fused_parts(model: nn.Module) -> dict[str, bool]:
    """Return the switches by which `fuse` fuses another model in the same parts as this one."""
    modules = list(model.modules())
    kinds = {kind for module in modules for kind in classes.overrides(module)}
    return {
        "norms": bool(kinds & {Norms.name, ModulatedNorms.name})
        or any(isinstance(module, FUSED_CLASSES) for module in modules),
        "activations": bool(kinds & {GatedMLPs.name, Experts.name}),
        "rope": Rotary.name in kinds,
        "attention": attention.KIND in kinds,
        "loss": "loss" in kinds,
        "hyper_connections": HyperConnections.name in kinds,
    }


def _fusing_like_policy(create: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function that loads the reference model: fuse its result as the policy is fused."""

    @functools.wraps(create)
    def created(*args: Any, **kwargs: Any) -> Any:
        model = create(*args, **kwargs)
        policy = _policy.get()
        if isinstance(policy, nn.Module):
            fuse(model, **fused_parts(policy))
        return model

    return created


def _recording_policy(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap a trainer's constructor: set `_policy`, and warn if ref_model is fused otherwise."""
    signature = inspect.signature(init)

    @functools.wraps(init)
    def constructor(self: Any, *args: Any, **kwargs: Any) -> None:
        arguments = signature.bind_partial(self, *args, **kwargs).arguments
        policy, reference = arguments.get("model"), arguments.get("ref_model")
        models = [model for model in (policy, reference) if isinstance(model, nn.Module)]
        if len(models) == 2 and fused_parts(models[0]) != fused_parts(models[1]):
            warnings.warn(
                "ref_model is not fused as the model is, so that the two round differently;"
                " call liger_ops.fuse(ref_model) before the trainer is made",
                stacklevel=2,
            )
        token = _policy.set(policy)
        try:
            init(self, *args, **kwargs)
        finally:
            _policy.reset(token)

    return constructor
