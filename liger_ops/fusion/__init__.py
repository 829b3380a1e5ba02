"""Replace parts of a model by fused ops, and undo it.

Each fuser handles one kind of part, which it recognises by what it computes. It first makes a plan
of what it will change in a model, and what it leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ..rewrites.engine.pattern import torch_linear
from . import lora as lora_layers
from . import loss as losses
from .attention import attention as attentions
from .layers.experts.experts import Experts
from .layers.experts.router_losses import RouterLossFunctions
from .layers.gated import GatedMLPs
from .layers.hyper_connections import HyperConnections
from .layers.norms import Norms
from .layers.rotary import Rotary
from .other_models import not_looked_for
from .planning import Plan, wholly_or_not_at_all
from .report import Finding, FuseReport
from .unfused import check_module, unfuse, verified
from .unknown_arguments import explain_unknown_keywords

# For each switch: what plans the changes of a model.
PLANS: dict[str, tuple[Callable[[nn.Module], Plan], ...]] = {
    "norms": (Norms.plan,),
    "activations": (GatedMLPs.plan, Experts.plan),
    "rope": (Rotary.plan,),
    "attention": (attentions.plan,),
    "hyper_connections": (HyperConnections.plan,),
    "lora": (lora_layers.plan,),
    # The loss with the head is fused after these.
    "loss": (RouterLossFunctions.plan,),
}
# The kind of a switch's findings, where it has another name.
KINDS = {"rope": Rotary.title}

__all__ = ["Finding", "FuseReport", "fuse", "unfuse"]


@explain_unknown_keywords
def fuse(
    model: nn.Module, *, norms: bool = True, activations: bool = True,
    rope: bool = True, attention: bool = True, loss: bool = True, hyper_connections: bool = True,
    lora: bool = False, verify: Any = None,
) -> FuseReport:  # fmt: skip
    """Compute the norms, activations, experts, rotary embeddings, hyper-connections, layers with a
    LoRA and losses of a model with the ops, and its attention with PyTorch's fastest exact engine.

    A module is recognised by what it computes, not by its class. The forward of a norm or of a
    gated activation, and the function that rotates queries and keys, are traced with tensors
    without data, and matched against the patterns of the backend `liger`: in bfloat16, float16 and
    float32, modules in training and in evaluation, casts included. A part that agrees is fused,
    from transformers or not; others are left.

    * Norms: a module without children, and with no parameters but a weight and a bias of one size,
      that computes `rms_norm`, `layer_norm` or `group_norm` with some offset, eps and casting mode,
      gets a forward that calls the op. So does a module that computes `gated_rms_norm` of its
      arguments, the second named gate. A module that projects an embedding and modulates norms by
      the projection, as AdaLayerNormZero of diffusers, gets a forward that calls
      `modulated_layer_norm` or `modulated_rms_norm` and the same children, except for the norms.
    * Gated activations: a module that projects its input once or twice, applies `swiglu`, `geglu`,
      `clamped_swiglu` or `relu_squared`, and projects the result, gets a forward that calls the
      same children and the op. The children may be anything, such as quantised layers and
      adapters, also when they are replaced later.
    * Experts of mixture models in transformers: a layer whose method `_apply_gate` computes one of
      these activations, and whose `experts_implementation` is grouped_mm or batched_mm, gets a
      forward that calls `moe_experts`. With another implementation, or a norm after each expert,
      `_apply_gate` becomes the op of the activation. An adapter of peft's `target_parameters` is
      part of the op. A layer whose experts each compute every token times its score, as Llama 4's,
      gets a forward that calls the router, the shared expert and `moe_experts` of the scores that
      are not 0. docs/experts.md says what is left.
    * Rotary embeddings: a forward that calls a global function of queries, keys and cosines and
      sines (or complex frequencies) which computes `rope` is copied, and the copy calls the op. If
      the function returns float32 for float32 tables and bfloat16 queries, as in autocast, the op's
      results are float32 too. Other forms of call still reach the function.
    * Attention: a model of transformers that makes causal masks gets a mask function and an
      attention function in transformers' registries. On a GPU in half precision they use
      scaled_dot_product_attention for causal masks, flash attention for sliding windows of large
      heads, and flex_attention with a block mask for other windows, padding, packed documents,
      chunks, soft caps and sinks. Elsewhere they are the model's own. docs/fuse.md says what is
      left.
    * The loss: a model with `get_output_embeddings()` whose loss is a cross-entropy of labels and
      the output of its head, a torch.nn.Linear. The model's own forward and loss function run as
      before, with logits that are not computed: a positive factor, a soft cap (tanh), a cast to
      float32, a bias per class, and the choice of rows are noted, and
      `torch.nn.functional.cross_entropy` of them is `linear_cross_entropy`. That is so in every
      step, whatever the attributes, the modules or the loss function are by then. Anything else
      that the model does to its logits, such as dropout, a mask, or a scale that is a parameter or
      a buffer, computes them: the loss is then the model's own, and a warning names the operation.
      A model that does so already when `fuse` is called is left. The head may be in a child, and
      the model may contain a language model. In training with labels the model returns the loss and
      no logits: `output.logits` is None. It returns logits as before in evaluation,
      without labels, with logits_to_keep, and with the argument `skip_logits=False` of its
      forward; `skip_logits=True` skips them in evaluation too. Everything else that the forward
      computes from the labels stays; the load-balancing loss of routers becomes `router_losses`,
      where a function of the model's file computes it. For a head in peft's
      modules_to_save, or with merged LoRA, the linear layer that it calls is used; LoRA adapters
      that are not merged are part of the op. docs/fuse.md says which.

      The forward takes `reduction`, `label_smoothing`, `lse_square_scale`, `accum_dtype` and
      `chunk_bytes`, as in `linear_cross_entropy`; `use_token_scaling`, which multiplies each
      token's loss by the probability of its label, as a constant; `return_token_accuracy` and
      `return_predicted_tokens`, which add `token_accuracy`, the share of labels predicted, and
      `predicted_tokens`, in the shape of the labels, to the output: by name, or at the end of a
      tuple. They are computed with and without logits, in place of the options of the model's own
      cross_entropy; where a step calls none of its head's logits, they raise. accum_dtype and
      chunk_bytes only control memory, and have no effect if logits are kept. `shift_labels` is
      accepted without labels too, if it gives the labels of the model's loss. A wrong value of any
      of these, or any of these without labels, raises TypeError or ValueError. Other arguments are
      passed on unchanged.

      A training step with labels also computes all logits if the head was replaced by another
      module, has hooks or is sharded by itself. It warns once per reason; with `skip_logits=True`
      any of these raises ValueError.

    * Hyper-connections: a module with three parameters that computes `mhc_coeffs` of its argument,
      and the layer's input by `mhc_pre`, as in DeepSeek-V4, gets a forward that calls both. The
      streams are mixed after the layer by the layer's own forward, where only the backend `liger`
      uses `mhc_post_res`. Float64, and autocast if base or scale are not float32, reach the
      module's code, whose results have other dtypes than the op's.

    * LoRA, if `lora` is true: a LoRA Linear of peft, on a torch.nn.Linear, with one active adapter
      and no dropout, gets a forward that calls `lora_linear`. docs/fuse.md says what is left.

    Each kind has a switch, an argument of this function.

    No module is replaced: the class of each fused module becomes a subclass of its own, with the
    same name, in which one method is overridden. Attributes, children, hooks and signature do not
    change. If an attribute that the module's code computes with, such as a limit, eps or the name
    of an activation, is changed later, or a child that the new forward does not call is replaced or
    gets hooks, the module's own code runs, with one warning. So it does in dtypes, such as float64,
    in which it computes something else. docs/fuse.md lists what is assumed after this call.

    In float32 results differ by rounding in the last place. In bfloat16 and float16 the norms round
    where the model's code does; gated activations and rope round once where that code rounds after
    each operation, two to four times, so they are closer to the equation. The loss is computed in
    float32 from logits in the model's dtype, and so are their scale and cap.

    Optimizers, tied weights and the state dict, keys and values, are not affected. `requires_grad`
    and the training mode stay. A module in several places of the model remains one module. The
    model can then be copied, pickled, saved, moved, cast, loaded into, checkpointed and compiled.
    Other models do not change, even those of the same classes, nor do random number generators.

    A module is left, and the report gives the reason, if fusing it could change what the model
    does: it computes something else (another activation, an operation in between, an active
    dropout), its parts have side effects (hooks of a child that would not be called, a forward set
    on the instance, as accelerate does, parametrizations), its code fails in a trace or a probe, or
    decides by a length or a batch what it computes, or a norm's parameters are not plain tensors. A
    norm whose class returns the weight's dtype is left if other parameters of the model have
    another dtype than its weight. Experts with an eager implementation, whose forward contains the
    activation, are left too. The loss is left if the head is not a torch.nn.Linear, is adapted or
    quantised, if the logits are used for anything else, and for classifiers.

    A model can be fused before or after FSDP2's `fully_shard`. Where FSDP2 shards the head by
    itself or with other modules, its hooks of the head run around the loss. It can also be fused
    before or after `parallelize_module`, and after transformers loaded it with a `tp_plan`: norms
    whose weight every rank has are fused, and the loss of a head under `ColwiseParallel` is
    `liger_ops.distributed.linear_cross_entropy`. Other parameters that are DTensors are left.
    Parameters that ZeRO-3 of DeepSpeed has partitioned are taken for whole.

    Modules that are already fused are skipped: a second call changes nothing. A call in autocast
    has the same result.

    Args:
        model: a transformers model, or any module. It is changed in place, completely, or not at
            all if an exception is raised.
        norms: whether to fuse norms.
        activations: whether to fuse gated activations, and experts.
        rope: whether to fuse rotary embeddings.
        attention: whether to register and use mask and attention functions.
        loss: whether to fuse the loss with the head, and the load-balancing loss of routers.
        hyper_connections: whether to fuse hyper-connections.
        lora: whether to fuse linear layers with a LoRA of peft. It saves memory, and on a GPU a
            pass over each result, but a call takes the host longer than peft's: not for steps that
            wait for the host.
        verify: a batch: a dictionary of the arguments of a call, a tuple of them, or the only one.
            The fused model is then compared with the unfused one on a training step of it, forward
            and backward, with the same random numbers: first in the model's own dtype, where no
            result may be further from float64 than twice the unfused model's own error, then in
            float64, where nothing but rounding may differ: the loss, every output and every
            gradient, and which parameters have one. Rounding in bfloat16, and attention of a GPU,
            which float64 does not reach, are compared in the model's dtype alone. The steps run on
            copies, one at a time, which with the gradients to compare take 24 bytes a parameter;
            `model` must have its data, and not be sharded. `explain(model, **batch, verify=True)`
            makes the comparison of a model that is already fused.

    Returns:
        A report of findings: `report.fused` are the modules that were changed, each with its name
        in the model (`where`), `class_name`, `kind`, `op` and `options`; `report.left` those that
        look fusible and were left, each with the `reason`. `report.counts()` is the number of
        modules fused per op, `len(report)` of all, and `str(report)` a table like that of
        `explain`, where `*` stands for a layer's number. With a batch `report.verification` says
        how far the results are apart.

    Raises:
        TypeError: model is not a torch.nn.Module, a switch is not a bool, verify is one, or an
            argument is not one of these; the text says if the fused model's forward takes it.
        ValueError: with `verify`, the fused model differs from the unfused one, or cannot be
            compared with it. The message says where, and by how much; the model is left as it was.

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
