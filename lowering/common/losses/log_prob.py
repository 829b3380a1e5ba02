"""log_prob on a device, by the row functions of the device's cross_entropy."""

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
    """The options of a call of log_prob as a call of cross_entropy, which has no tensors: the
    temperature is part of softcap and logit_scale. The targets are counted from class `first`."""
    options = tempered(call.temperature, call.softcap, call.logit_scale)
    return loss_of_tokens(call.ignore_index - first, *options)


def results(call: Any, *outputs: Tensor | None) -> TokenTensors:
    """The targets of a call, and the results to fill."""
    given = zip(_NAMES, map(flat, outputs), strict=True)
    return TokenTensors(None, flat(call.target), None, **dict(given))


def given_tokens(call: Any) -> TokenTensors:
    """The tensors of the tokens that a backward op is given."""
    statistics = {name: flat(getattr(call, name)) for name in ("lse", "entropy", "lse_error")}
    return TokenTensors(None, flat(call.target), None, **statistics)


def register(device: str, kernels: Any, rows: Callable[[Tensor], Tensor]) -> None:
    """Register the ops with the row functions of the module `kernels`; `rows` returns the logits as
    (M, V) for them."""

    module = kernels.__name__

    @library.kernel("log_prob_forward", device, module=module)
    def log_prob_forward(call, *outputs_and_plan):
        *outputs, plan = outputs_and_plan
        loss, tokens = as_loss(call), results(call, *outputs)
        kernels.loss_and_gradient(loss, rows(call.logits), tokens, False, plan)
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
