"""Run an op on a rank's words, with autograd."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...autograd import Formula
from ...library import OPS
from ...meta.arguments import options_check
from ...ops.heads.gradients import WEIGHT
from ...ops.heads.precomputed_gradient import hand_over
from ...ops.heads.scaling import scale_
from ..vocab_parallel import SHARDED_LOSSES
from ..vocab_parallel.collectives import once
from ..vocab_parallel.shard import VocabShard

# Checks of the options, for all ranks: the op does the same, but a rank without words does not call
# it.
CHECKS = {
    name: options_check(OPS[f"{name}_forward"], f"distributed.{name}") for name in SHARDED_LOSSES
}


def sharded_op(
    name: str, shard: VocabShard, asked: tuple[str, ...], arguments: Mapping[str, Any],
    constant: tuple[str, ...] = (), known: tuple[Tensor | None, ...] = (),
) -> tuple[Any, ...]:  # fmt: skip
    """Call op `<name>_forward` on the rank's words, with those of `arguments` that it has. Return
    the results named in `asked`, which have gradients, and then those named in `constant`, which
    have none. `known` are the op's first results, if they have been computed before: they then only
    get a gradient."""
    call_of = OPS[f"{name}_forward"].arguments
    call = call_of(**{key: arguments[key] for key in call_of._fields if key in arguments})
    CHECKS[name](call)
    return ShardedOp.apply(name, shard, asked, constant, len(known), *known, *call)


class ShardedOp(torch.autograd.Function):
    """Autograd function of an op on the rank's words. Its results are the same on every rank, to
    the last bit, and their incoming gradients have to be the same too.

    Dynamo passes a gradient for every result that is not constant. A result whose gradient the
    forward has not computed therefore belongs in a call of its own: its gradient, even if zero,
    would have the backward compute everything again.
    """

    @staticmethod
    def forward(
        ctx: Any, name: str, shard: VocabShard, asked: tuple[str, ...], constant: tuple[str, ...],
        count: int, *values: Any,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        loss, op = SHARDED_LOSSES[name], OPS[f"{name}_forward"]
        call, formula = op.arguments(*values[count:]), op.formula
        results = dict.fromkeys(formula.results)
        computed = values[:count] or loss.forward(op, call, shard)
        results.update(zip(formula.results, computed, strict=False))
        ctx.handed_over = []
        if results.get("dweight") is not None and not torch.compiler.is_compiling():
            ctx.handed_over = hand_over(results["dweight"], getattr(call, loss.sharded).dtype)
        if ctx.handed_over:
            results["dweight"] = None
        available = call._asdict() | results
        Formula.save(formula, ctx, [available[name] for name in formula.saved_names])
        # 5 arguments of `apply` come before the known results, and those before the op's arguments.
        ctx.of_call = (name, shard, asked, 5 + count)
        ctx.set_materialize_grads(False)
        # Clones, because a result must alias neither a saved tensor nor an argument.
        chosen = [results[name] for name in (*asked, *constant)]
        chosen = [x if x is None else x.clone() for x in chosen]
        ctx.mark_non_differentiable(*(x for x in chosen[len(asked) :] if x is not None))
        return tuple(chosen)

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        name, shard, asked, first = ctx.of_call
        loss, op = SHARDED_LOSSES[name], OPS[f"{name}_forward"]
        formula, gradient_op = op.formula, op.formula.gradient
        names = gradient_op.arguments._fields
        arguments: dict[str, Any] = dict.fromkeys(names[: formula.count])
        arguments.update(zip((f"d{result}" for result in asked), grads, strict=False))
        # Read only once, because a checkpoint recomputes the saved tensors at each access.
        saved = (*ctx.saved_tensors, *ctx.options)
        arguments.update(zip(formula.saved_names, saved, strict=True))
        positions = [first + op.arguments._fields.index(x) for x in loss.differentiated]
        needed, dweight = [ctx.needs_input_grad[i] for i in positions], None
        if "output_mask" in names:
            arguments["output_mask"] = needed
        call = gradient_op.arguments(**arguments)
        if ctx.handed_over:
            # The gradient's own memory is scaled and returned; a second backward finds the list
            # empty, and computes the gradient again. `needed` is the list in call.output_mask.
            dweight = scale_(ctx.handed_over.pop(), formula.factor(call))
            needed[WEIGHT] = False
        gradients: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        for i, gradient in zip(positions, loss.backward(gradient_op, call, shard), strict=True):
            gradients[i] = gradient
        if dweight is not None:
            gradients[positions[WEIGHT]] = dweight
        return tuple(gradients)
