"""Classification losses, and the operations that models compose them of."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .call import Call, declared, dimension, spelled

_OPTIONS = "size_average!=None ignore_index=-100 reduce!=None reduction='mean'"
declared(
    "cross_entropy", f"input target weight=None {_OPTIONS} label_smoothing=0.0", F.cross_entropy
)
declared("nll_loss", f"input target weight=None {_OPTIONS}", F.nll_loss)
declared(
    "logsumexp", "input dim+ keepdim=False", torch.logsumexp, torch.special.logsumexp, "logsumexp"
)
declared("gather", "input dim index sparse_grad!=False", torch.gather, "gather")
spelled(torch.take_along_dim, "take_along_dim")(
    lambda input, indices, dim=None: Call("gather", (input, dimension(input, dim), indices))
)
declared("full_like", "input fill_value", torch.full_like)
declared("scatter", "input dim index src", torch.scatter, "scatter", "scatter_")
declared("sum", "input dim+=None keepdim=False dtype=None", torch.sum, "sum")
