"""log_prob on a device, computed by the row functions of the device's cross_entropy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .... import library
from ....ops.losses.log_prob import RESULTS, tempered
from ..tensors import flat
from .cross_entropy import TokenTensors, loss_of_tokens, per_token

_NAMES = RESULTS.split()


def as_loss(call: Any, first: int = 0) -> Any:
    """Return the options of a call of log_prob as a call of cross_entropy without tensors. The
    temperature is part of softcap and logit_scale, and targets are counted from class `first`."""
    options = tempered(call.temperature, call.softcap, call.logit_scale)
    return loss_of_tokens(call.ignore_index - first, *options)


def results(call: Any, *outputs: Tensor | None) -> TokenTensors:
    """Return the targets of a call, and the results to fill."""
    named = zip(_NAMES, map(flat, outputs), strict=True)
    return TokenTensors(None, flat(call.target), None, **dict(named))


def given_tokens(call: Any) -> TokenTensors:
    """Return the tensors of a backward call's tokens."""
    statistics = {name: flat(getattr(call, name)) for name in ("lse", "entropy", "lse_error")}
    return TokenTensors(None, flat(call.target), None, **statistics)


def register(device: str, kernels: Any, rows: Callable[[Tensor], Tensor]) -> None:
    """Register the ops with the row functions of the module `kernels`; rows(logits) returns the
    logits as (M, V)."""

    module = kernels.__name__

    @library.kernel("log_prob_forward", device, module=module)
    def log_prob_forward(call, *outputs_and_plan):
        *outputs, plan = outputs_and_plan
        loss, tokens = as_loss(call), results(call, *outputs)
        kernels.loss_and_gradient(loss, rows(call.logits), tokens, False, plan)
        # Only for its check of the targets: nothing is reduced.
        total = tokens.lse.new_empty(())
        kernels.reduce(loss, call.logits.shape[-1], tokens, None, None, total)

    @library.kernel("log_prob_backward", device, module=module)
    def log_prob_backward(call, dlogits, plan):
        dloss = None if call.dlog_prob is None else -call.dlog_prob
        dlse = call.dlse
        if dlse is not None:
            dlse = dlse.masked_fill(call.target == call.ignore_index, 0.0)
        upstream = per_token(dloss, None, dlse, None, call.dentropy)
        dlogits = dlogits.view(-1, call.logits.shape[-1])
        tokens = given_tokens(call)
        kernels.gradient(as_loss(call), upstream, rows(call.logits), tokens, dlogits, plan)
