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
    """Shard projections, embedding and head of a model of transformers; with `sequence` also the
    rows of what is between them. The head's logits have the placement `logits`, or are gathered.
    With `local_rows` its input is a plain tensor of the rank's rows."""
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    parallelize_module(model, mesh, plan(model, sequence, logits or Replicate(), local_rows))
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model


def plan(model: Any, sequence: bool, logits: Placement, local_rows: bool) -> dict[str, Any]:
    # Rows in DTensors need not divide.
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
        own: dict[str, Any] = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        own["self_attn.o_proj"] = RowwiseParallel(**out)
        if hasattr(layer.self_attn, "q_norm"):
            # Heads are the third dimension there.
            heads = SequenceParallel(sequence_dim=2, use_local_output=True)
            own |= {"self_attn.q_norm": heads, "self_attn.k_norm": heads}
        own |= {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel()}
        own["mlp.down_proj"] = RowwiseParallel(**out)
        if sequence:
            names = (name for name, _ in layer.named_children() if "norm" in name)
            own |= {name: SequenceParallel() for name in names}
            own["self_attn"] = PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": Shard(1)},
                desired_input_kwarg_layouts={"hidden_states": Replicate()},
            )
            own["mlp"] = PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            )
        styles |= {f"model.layers.{i}.{name}": style for name, style in own.items()}
    return styles
