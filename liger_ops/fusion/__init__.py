"""Swapping parts of a model for fused ones, and back.

Each fuser knows one kind of part and finds it by what it computes. It makes a plan of what it will
change in a model, and what it leaves.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from . import classes, experts, gated
from . import loss as losses
from . import norms as norm_modules
from . import rope as rotary_embeddings
from .planning import Plan, wholly_or_not_at_all
from .report import Fused, FuseReport, Left

__all__ = ["FuseReport", "Fused", "Left", "fuse", "unfuse"]


def fuse(
    model: nn.Module,
    *,
    norms: bool = True,
    activations: bool = True,
    rope: bool = True,
    loss: bool = True,
) -> FuseReport:
    """Let the norms, activations, rotary embeddings and the loss of a model be computed by the ops.

    What a module computes decides, not its class. The forward of a norm or of a gated activation is
    traced with tensors without data, and is matched with the patterns that the backend `liger` has
    for the ops: in bfloat16, float16 and float32, in training and in evaluation, casts included.
    The code of rotary embeddings and losses runs on the CPU, and is compared with the definitions
    of the ops. What agrees is fused, from transformers or not; what does not is left.

    * Norms: a module without children, and with no parameters but a weight and a bias of one size,
      that is `rms_norm`, `layer_norm` or `group_norm` under some offset, eps and casting mode, is
      replaced by the fused module, which has the same Parameter objects under the same names.
    * Gated activations: a module that projects its input once or twice, and projects again what
      `swiglu`, `geglu`, `clamped_swiglu` or `relu_squared` is of that, gets a forward that calls
      the same children and the op. The children may be anything, such as quantised layers and
      adapters, also those put there later. Of the experts of mixture models in transformers it is
      the method `_apply_gate` that is the op.
    * Rotary embeddings: a forward that calls a global function of queries, keys and cosines and
      sines (or complex frequencies) which is `rope` is made again, to call the op. Where tables of
      float32 make float32 of queries in bfloat16, as in autocast, the op's results are float32 too.
      Calls of other forms still reach the function.
    * The loss: a model with `get_output_embeddings()`, whose loss is the cross-entropy of its
      labels, shifted by one or not, and of what its head, a torch.nn.Linear, returns, also scaled
      or capped, computes it by `linear_cross_entropy`. It may come of the model's `loss_function`
      or of a torch.nn.CrossEntropyLoss in its forward. The head may be a part of a child, and the
      model one that holds a language model. While it trains and labels are
      given, it returns the loss and no logits: `output.logits` is None. It returns them as before
      in evaluation, without labels, where logits_to_keep is given, and for the argument
      `skip_logits=False` of its forward; `skip_logits=True` lets it do without them in evaluation
      too. All else that its forward computes from the labels, such as the loss of routers, stays.
      A head in peft's modules_to_save, and one whose LoRA is merged, is the linear layer that it
      calls.

      The forward takes `reduction`, `label_smoothing`, `lse_square_scale`, `accum_dtype` and
      `chunk_bytes`, as of `linear_cross_entropy`; `use_token_scaling`, which multiplies each
      token's loss by the probability of its label, as a constant; `return_token_accuracy` and
      `return_predicted_tokens`, which add `token_accuracy`, the share of the labels predicted, and
      `predicted_tokens`, of the labels' shape, to the output: by name, or at the end of a tuple.
      They are computed with and without logits, but for models whose forward calls
      CrossEntropyLoss: there they raise where logits are kept. accum_dtype and chunk_bytes, which
      set memory alone, have nothing to set where logits are kept. It takes `shift_labels` without
      labels too, where its loss_function takes them. A wrong value of any of these raises TypeError
      or ValueError, and so does asking for any without labels. Other arguments go where they went.

      Where a step of training with labels has to make all logits, since the head has become another
      module, has hooks or is sharded by itself, or loss_function another function, it computes what
      the model did before, and warns once of each reason; for `skip_logits=True` it raises
      ValueError.

    Each kind has a switch, an argument of this function.

    Of the last three no module is replaced: the class of each such module becomes a subclass of its
    own, of the same name, in which one method is overridden. Its attributes, children, hooks and
    signature are what they were, and what its code read from its attributes to compute with, such
    as a limit or the name of an activation, is read once, now.

    In float32 results change by rounding in the last place. In bfloat16 and float16 the norms round
    where the model's code does; gated activations and rope round once where that rounds after each
    operation, two to four times: they are nearer to the equation. The loss is computed in float32
    from logits in the model's dtype, and so are their scale and cap.

    Optimizers, tied weights and the state dict, keys and values, do not notice. `requires_grad` and
    the training mode stay. A module in several places of the model remains one module. The model
    can then be copied, pickled, saved, moved, cast, loaded into, checkpointed and compiled. Other
    models stay as they are, those of the same classes too, and the state of random number
    generators.

    A module is left, and the report says why, where fusing it could change what the model does: it
    computes something else (another activation, something between, a dropout that is active), or
    its parts do something beside (hooks, a forward of its own on the instance, as accelerate sets
    it, parametrizations), its code fails in a trace or a probe, or a norm's parameters are no plain
    tensors. A norm whose class returns the weight's dtype is left where the model's other
    parameters have another dtype than its weight. Experts whose implementation is eager, with the
    activation in their forward, are left too. So is the loss where the head is none of
    torch.nn.Linear's, is adapted or quantised, or where the logits serve for anything else, and
    that of classifiers.

    A model can be fused before FSDP2's `fully_shard` and after it. After it, the norms whose
    parameters it holds stay in their places too, and their classes become subclasses. Parameters
    that are DTensors for another reason, such as tensor parallelism, are left.

    What is fused already is passed over: a second call changes nothing. It may be called in
    autocast, and finds the same there.

    Args:
        model: a transformers model, or any module. It is changed in place, wholly, or where an
            exception is raised, not at all.
        norms: whether to fuse norms.
        activations: whether to fuse gated activations, those of experts too.
        rope: whether to fuse rotary embeddings.
        loss: whether to fuse the loss with the head.

    Returns:
        A report: `report.fused` and `report.left` list modules, `str(report)` is a table,
        `len(report)` the number of modules fused.

    Raises:
        TypeError: model is not a torch.nn.Module, or a switch is not a bool.

    Example:
        >>> print(liger_ops.fuse(torch.nn.Sequential(torch.nn.LayerNorm(8))))
        1 norm fused
          1 x LayerNorm -> layer_norm(eps=1e-05)  0
    """
    _check_module("fuse", model)
    switches = {"norms": norms, "activations": activations, "rope": rope, "loss": loss}
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise TypeError(f"fuse: {name} must be True or False, got {value!r}")
    plans = [plan(model) for plan, wanted in _planners(norms, activations, rope) if wanted]
    fused = [entry for plan in plans for entry in plan.fused]
    left = [entry for plan in plans for entry in plan.left]
    with wholly_or_not_at_all(model):
        for plan in plans:
            for change in plan.changes:
                change()
        if loss:
            fused_losses, left_losses = losses.fuse(model)
            fused += fused_losses
            left += left_losses
    return FuseReport(tuple(fused), tuple(left))


def _planners(
    norms: bool, activations: bool, rope: bool
) -> tuple[tuple[Callable[[nn.Module], Plan], bool], ...]:
    return (
        (norm_modules.plan, norms),
        (gated.plan, activations),
        (experts.plan, activations),
        (rotary_embeddings.plan, rope),
    )


def unfuse(model: nn.Module) -> int:
    """Put back what `fuse` changed, with the parameters and training mode of now.

    Norms are the very objects that were there before. They get the Parameter objects that the fused
    modules hold by now, which loading or casting may have replaced. Hooks registered on a fused
    norm go with it. The other modules get their classes back.

    Args:
        model: a module that was given to `fuse`, or a copy of one. It is changed in place.

    Returns:
        The number of modules put back, counting one once for each kind of thing fused in it.

    Raises:
        TypeError: model is not a torch.nn.Module.
        RuntimeError: the class of a fused module was changed since, as parametrizations do, or
            `fully_shard` holds the parameters of a norm that was fused before; nothing is put back.
    """
    _check_module("unfuse", model)
    # Both refuse before anything has changed.
    norm_modules.check_unfuse(model)
    count = classes.restore(model)
    return count + norm_modules.unfuse(model)


def _check_module(function: str, model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{function}: model must be a torch.nn.Module, got {type(model).__name__}")
