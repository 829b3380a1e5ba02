"""Tensor parallelism of small causal language models by `parallelize_module`."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


def parallel(
    model: Any, mesh: Any, sequence: bool = True, logits: Placement | None = None,
    local_rows: bool = False,
) -> Any:  # fmt: skip
    """Shard projections, embedding and head of a model of transformers.

    sequence: Whether the rows of the hidden states between them are sharded, too.
    logits: The placement of the head's logits; None gathers them.
    local_rows: Whether the head's input is a plain tensor of the rank's rows.
    """
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    parallelize_module(model, mesh, plan(model, sequence, logits or Replicate(), local_rows))
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model


def plan(model: Any, sequence: bool, logits: Placement, local_rows: bool) -> dict[str, Any]:
    # DTensors, because their rows need not divide by the ranks.
    rows: dict[str, Any] = {"output_layouts": Shard(1), "use_local_output": False}
    out = rows if sequence else {}
    styles: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), **out),
        "lm_head": ColwiseParallel(
            input_layouts=Shard(1) if sequence else Replicate(),
            output_layouts=logits,
            use_local_output=logits.is_replicate(),
        ),
    }
    if sequence:
        styles["model.norm"] = SequenceParallel(use_local_output=local_rows)
    for i, layer in enumerate(model.model.layers):
        layer_styles: dict[str, Any] = {
            f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"
        }
        layer_styles["self_attn.o_proj"] = RowwiseParallel(**out)
        if hasattr(layer.self_attn, "q_norm"):
            # Heads are the third dimension there.
            heads = SequenceParallel(sequence_dim=2, use_local_output=True)
            layer_styles |= {"self_attn.q_norm": heads, "self_attn.k_norm": heads}
        layer_styles |= {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel()}
        layer_styles["mlp.down_proj"] = RowwiseParallel(**out)
        if sequence:
            names = (name for name, _ in layer.named_children() if "norm" in name)
            layer_styles |= {name: SequenceParallel() for name in names}
            layer_styles["self_attn"] = PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": Shard(1)},
                desired_input_kwarg_layouts={"hidden_states": Replicate()},
            )
            layer_styles["mlp"] = PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            )
        styles |= {f"model.layers.{i}.{name}": style for name, style in layer_styles.items()}
    return styles
