"""Make the functions over process groups, each of which has the arguments of an op, and a group,
and runs the op on a rank's words, with autograd.
"""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Callable, Mapping
from inspect import Parameter, signature
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...autograd import Formula
from ...library import COMPOSED, OPS
from ...meta.arguments import options_check
from ...nn.derived import described, entries, sections
from ...ops.heads.gradients import WEIGHT
from ...ops.heads.head import scale_
from ...ops.heads.precomputed_gradient import hand_over
from ..vocab_parallel import SHARDED_LOSSES
from ..vocab_parallel.shard import VocabShard, once

Function = TypeVar("Function", bound=Callable[..., Any])

# Documentation of the arguments that differ from those of the op.
_OF_RANKS = """
    x: (..., D), floating point: the whole x, or the rank's part along `sequence_dim`, of the same
        size on every rank; or a DTensor with the placement Replicate(), or Shard(d) for any
        dimension d but the last, whose size need not be divisible by the number of ranks.
    weight: (V / ranks, D), the rank's words; or a DTensor (V, D) with the placement Shard(0).
    target: (...), int64 or int32, of all tokens and the whole vocabulary; each is ignore_index, or
        from 0 to V - 1.
    bias: (V / ranks,); or a DTensor (V,) with the placement Shard(0).
    class_weight: (V,), the weight of every word.
    lora_a: (R, D), floating point, whole on every rank, or a DTensor with the placement
        Replicate(): with lora_b, a LoRA that is added to weight. Every rank has its whole gradient.
    lora_b: (V / ranks, R), the rank's words; or a DTensor (V, R) with the placement Shard(0).
    group: the process group over whose ranks the words are split, in their order; None for
        DTensors.
    vocab_size: V; None for DTensors.
    sequence_dim: the dimension along which x is sharded, or None if it is whole. It is None for a
        weight that is a DTensor: x is then sharded by its placement, or whole if it is a plain
        tensor.
"""
_SECTIONS = {
    "Raises": """    TypeError: the sharded argument is not a tensor, or a dtype is not accepted.
    ValueError: a tensor does not have the rank's number of words, or the tokens of x; a DTensor has
        another placement or mesh; group or vocab_size is missing; group, vocab_size or sequence_dim
        is given with DTensors; an option has a value that is not accepted; or a tensor that has no
        gradient, such as the target, requires one.""",
    "Source": """    Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models
    Using Model Parallelism", 2019.""",
}


def of_ranks(compute: Callable[[str, Any], Any]) -> Callable[[Function], Function]:
    """Implement a function by `compute(name, call)`, where `call` is the named tuple of its
    arguments. Arguments that its docstring does not describe are documented as those of the op."""

    def decorate(function: Function) -> Function:
        name, parameters = function.__name__, signature(function).parameters
        defaults = [p.default for p in parameters.values() if p.default is not Parameter.empty]
        call_of = namedtuple(name, list(parameters), defaults=defaults)  # type: ignore[misc]
        keywords = sum(p.kind is Parameter.KEYWORD_ONLY for p in parameters.values())
        most = len(parameters) - keywords

        @functools.wraps(function)
        def public(*args: Any, **kwargs: Any) -> Any:
            if len(args) > most:
                raise TypeError(f"distributed.{name}: at most {most} arguments go by position")
            return compute(name, call_of(*args, **kwargs))

        doc, op_doc = sections(function.__doc__), sections(COMPOSED[name].__doc__)
        texts = entries(op_doc["Args"]) | entries(_OF_RANKS) | entries(doc.get("Args", ""))
        doc["Args"] = described(parameters, texts)
        body = {"": doc.pop(""), "Args": doc.pop("Args"), **doc, **_SECTIONS}
        public.__doc__ = "\n\n".join(f"{k}:\n{v}" if k else v for k, v in body.items())
        return public  # type: ignore[return-value]

    return decorate


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
