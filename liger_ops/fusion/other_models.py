"""Report the heads and attentions of models outside transformers that `fuse` does not look for."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from torch import nn

from ..rewrites.engine.report import Finding
from . import classes
from .attention import attention
from .layers.rotary import Rotary

ATTENTION_NAME = re.compile(r"attn|attention", re.IGNORECASE)
DOORS = "torch.compile(model, backend='liger') and liger_ops.enable() find it in any code"

NO_LOSS = (
    "a loss of its logits is looked for in forwards that take labels, of models with"
    f" get_output_embeddings(); {DOORS}"
)
NO_ROPE = (
    f"rope is looked for in a function of queries, keys and tables that the forward calls; {DOORS}"
)
NO_ATTENTION = f"attention is looked for in models of transformers; {DOORS}"


def not_looked_for(
    model: nn.Module, kinds: Collection[str], findings: Collection[Finding]
) -> Iterator[Finding]:
    """Yield a finding for each head and attention about which no fuser of `kinds` has reported.

    A head is a linear layer as wide as an embedding; an attention has the word in its class's name.
    """
    reported = {(finding.kind, finding.where) for finding in findings}
    pretrained = [name for name, one in model.named_modules() if attention.is_pretrained(one)]
    words = {one.num_embeddings for one in model.modules() if isinstance(one, nn.Embedding)}
    has_loss = any(finding.kind == "loss" for finding in findings)
    for name, module in model.named_modules():
        if any(not outer or f"{name}.".startswith(f"{outer}.") for outer in pretrained):
            continue
        class_name = classes.class_of(module).__name__
        reasons = {}
        if isinstance(module, nn.Linear) and module.out_features in words and not has_loss:
            reasons["loss"] = NO_LOSS
        elif ATTENTION_NAME.search(class_name):
            reasons = {Rotary.title: NO_ROPE, attention.KIND: NO_ATTENTION}
        for kind, reason in reasons.items():
            if kind in kinds and (kind, name) not in reported:
                yield Finding("", reason, name, class_name=class_name, kind=kind)
