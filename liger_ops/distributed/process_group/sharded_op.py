"""Run an op on a rank's words, with autograd."""

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


class ShardedFormula(NamedTuple):
    """The autograd formula of a loss over a sharded vocabulary."""

    loss: ShardedLoss
    op: Op
    # Names of what the forward saves, and of the arguments and results of the backward op.
    formula: Formula
    # The positions of the arguments that have gradients.
    differentiated: tuple[int, ...]

    @staticmethod
    def of(name: str, loss: ShardedLoss) -> ShardedFormula:
        op = OPS[f"{name}_forward"]
        positions = map(op.arguments._fields.index, loss.differentiated)
        return ShardedFormula(loss, op, Formula(op, OPS[f"{name}_backward"]), tuple(positions))


FORMULAS = {name: ShardedFormula.of(name, loss) for name, loss in SHARDED_LOSSES.items()}


def sharded_op(
    name: str, shard: VocabShard, asked: tuple[str, ...], *arguments: Any,
    constant: tuple[str, ...] = (), known: tuple[Tensor | None, ...] = (), **named: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Call op `<name>_forward` on the rank's words, and return the results named in `asked`, which
    have gradients, and then those named in `constant`, which have none. `known` are the op's first
    results, if they have been computed before: they then only get a gradient."""
    call = FORMULAS[name].op.arguments(*arguments, **named)
    return ShardedOp.apply(name, shard, asked, constant, len(known), *known, *call)


class ShardedOp(Function):
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
        sharded = FORMULAS[name]
        call = sharded.op.arguments(*values[count:])
        results = dict.fromkeys(sharded.formula.results)
        computed = values[:count] or sharded.loss.forward(sharded.op, call, shard)
        results.update(zip(sharded.formula.results, computed, strict=False))
        ctx.handed_over = []
        if results.get("dweight") is not None and not torch.compiler.is_compiling():
            ctx.handed_over = hand_over(
                results["dweight"], getattr(call, sharded.loss.sharded).dtype
            )
        if ctx.handed_over:
            results["dweight"] = None
        available = call._asdict() | results
        saved = [available[name] for name in sharded.formula.saved_names]
        tensors = [x if isinstance(x, Tensor) else None for x in saved]
        ctx.save_for_backward(*tensors)
        ctx.others = [x if t is None else None for x, t in zip(saved, tensors, strict=True)]
        # 5 arguments of `apply` come before the known results, and those before the op's arguments.
        ctx.options = (name, shard, asked, 5 + count, 5 + len(values))
        ctx.set_materialize_grads(False)
        # Clones, because a result must alias neither a saved tensor nor an argument.
        chosen = [results[name] for name in (*asked, *constant)]
        chosen = [x if x is None else x.clone() for x in chosen]
        ctx.mark_non_differentiable(*(x for x in chosen[len(asked) :] if x is not None))
        return tuple(chosen)

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        name, shard, asked, first, count = ctx.options
        sharded = FORMULAS[name]
        # Read only once, because a checkpoint recomputes the saved tensors at each access.
        pairs = zip(ctx.saved_tensors, ctx.others, strict=True)
        values = [other if tensor is None else tensor for tensor, other in pairs]
        names = sharded.formula.gradient.arguments._fields
        arguments: dict[str, Any] = dict.fromkeys(names[: sharded.formula.count])
        arguments.update(zip(sharded.formula.saved_names, values, strict=True))
        for result, grad in zip(asked, grads, strict=False):
            arguments[f"d{result}"] = grad
        needed, dweight = [ctx.needs_input_grad[first + i] for i in sharded.differentiated], None
        if "output_mask" in names:
            arguments["output_mask"] = needed
        call = sharded.formula.gradient.arguments(**arguments)
        if ctx.handed_over:
            # The gradient's own memory is scaled and returned; a second backward finds the list
            # empty, and computes the gradient again. `needed` is the list in call.output_mask.
            factors = factors_of(call, divisor(call, getattr(call, "total_weight", call.dloss)))
            dweight, needed[WEIGHT] = scale_(ctx.handed_over.pop(), factors[WEIGHT]), False
        computed = sharded.loss.backward(sharded.formula.gradient, call, shard)
        gradients: list[Tensor | None] = [None] * count
        for i, gradient in zip(sharded.differentiated, computed, strict=True):
            gradients[first + i] = gradient
        if dweight is not None:
            gradients[first + sharded.differentiated[WEIGHT]] = dweight
        return tuple(gradients)
