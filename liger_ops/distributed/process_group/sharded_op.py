"""An op of a rank's words, with its gradient."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from ...autograd import Formula
from ...library import OPS
from ...ops.heads.gradients import WEIGHT
from ...ops.heads.head import divisor, factors_of
from ...ops.heads.precomputed_gradient import hand_over
from ...ops.heads.scaling import scale_
from ...record import Op
from ..vocab_parallel import SHARDED_LOSSES, ShardedLoss
from ..vocab_parallel.collectives import once
from ..vocab_parallel.shard import VocabShard


class Form(NamedTuple):
    loss: ShardedLoss
    op: Op
    # The arguments and results of the backward op.
    formula: Formula
    # The positions of the arguments that have gradients.
    differentiated: tuple[int, ...]

    @staticmethod
    def of(name: str, loss: ShardedLoss) -> Form:
        op = OPS[f"{name}_forward"]
        positions = map(op.arguments._fields.index, loss.differentiated)
        return Form(loss, op, Formula(op, OPS[f"{name}_backward"]), tuple(positions))


FORMS = {name: Form.of(name, loss) for name, loss in SHARDED_LOSSES.items()}


def sharded_op(
    name: str, shard: VocabShard, asked: tuple[str, ...], *arguments: Any,
    constant: tuple[str, ...] = (), known: tuple[Tensor | None, ...] = (), **named: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """The results of an op's call that are asked for, and those that are constants. The op's first
    results may be known: they are not computed again, and only differentiated."""
    call = FORMS[name].op.arguments(*arguments, **named)
    return ShardedOp.apply(name, shard, asked, constant, len(known), *known, *call)


class ShardedOp(Function):
    """The results are the same on every rank, to the last bit, and their gradients have to be the
    same too.

    Dynamo takes every result that is not a constant for one that has a gradient, so that a result
    from which the backward would compute all anew is to be one of another call.
    """

    @staticmethod
    def forward(
        ctx: Any, name: str, shard: VocabShard, asked: tuple[str, ...], constant: tuple[str, ...],
        count: int, *values: Any,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        form = FORMS[name]
        call = form.op.arguments(*values[count:])
        results = dict.fromkeys(form.formula.results)
        found = values[:count] or form.loss.forward(form.op, call, shard)
        results.update(zip(form.formula.results, found, strict=False))
        ctx.handed_over = []
        if results.get("dweight") is not None and not torch.compiler.is_compiling():
            ctx.handed_over = hand_over(results["dweight"], getattr(call, form.loss.sharded).dtype)
        if ctx.handed_over:
            results["dweight"] = None
        kept = call._asdict() | results
        saved = [kept[name] for name in form.formula.saved_names]
        tensors = [x if isinstance(x, Tensor) else None for x in saved]
        ctx.save_for_backward(*tensors)
        ctx.others = [x if t is None else None for x, t in zip(saved, tensors, strict=True)]
        ctx.given = (name, shard, asked, 5 + count, 5 + len(values))
        ctx.set_materialize_grads(False)
        # A result is another tensor than what is saved, and than an argument.
        chosen = [results[name] for name in (*asked, *constant)]
        chosen = [x if x is None else x.clone() for x in chosen]
        ctx.mark_non_differentiable(*(x for x in chosen[len(asked) :] if x is not None))
        return tuple(chosen)

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        name, shard, asked, first, count = ctx.given
        form = FORMS[name]
        # Read only once, because a checkpoint recomputes the saved tensors at each access.
        pairs = zip(ctx.saved_tensors, ctx.others, strict=True)
        values = [other if tensor is None else tensor for tensor, other in pairs]
        names = form.formula.gradient.arguments._fields
        given: dict[str, Any] = dict.fromkeys(names[: form.formula.count])
        given.update(zip(form.formula.saved_names, values, strict=True))
        for result, grad in zip(asked, grads, strict=False):
            given[f"d{result}"] = grad
        wanted, whole = [ctx.needs_input_grad[first + i] for i in form.differentiated], None
        if "output_mask" in names:
            given["output_mask"] = wanted
        call = form.formula.gradient.arguments(**given)
        if ctx.handed_over:
            # A second backward finds none, and computes it again.
            factors = factors_of(call, divisor(call, getattr(call, "total_weight", call.dloss)))
            whole, wanted[WEIGHT] = scale_(ctx.handed_over.pop(), factors[WEIGHT]), False
        found = form.loss.backward(form.formula.gradient, call, shard)
        gradients: list[Tensor | None] = [None] * count
        for i, gradient in zip(form.differentiated, found, strict=True):
            gradients[first + i] = gradient
        if whole is not None:
            gradients[first + form.differentiated[WEIGHT]] = whole
        return tuple(gradients)
