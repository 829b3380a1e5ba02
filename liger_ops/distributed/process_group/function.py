"""Make the functions over process groups, each of which has the arguments of an op, and a group."""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any, TypeVar

from ...accepted import Accepted, one_of
from ...library import COMPOSED, OPS, tensor_names
from ...nn.derived import described, entries, sections
from ...ops.heads.head import HEAD, needed_gradients
from ..vocab_parallel import SHARDED_LOSSES
from .arguments import RankArguments, read_arguments

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

# Op -> its tensor arguments that are whole on every rank and have no gradient.
_WHOLES = {
    name: [
        tensor
        for tensor in tensor_names(OPS[f"{name}_forward"])
        if tensor not in loss.differentiated
        and (tensor == "teacher_ids" or not tensor.startswith("teacher_"))
    ]
    for name, loss in SHARDED_LOSSES.items()
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


def read(name: str, call: Any, *more: str) -> tuple[RankArguments, dict[str, Any]]:
    """Read a call: return its arguments on this rank, and the arguments of the op `<name>_forward`.
    `more` are names of whole arguments that the op does not have."""
    loss, op, title = SHARDED_LOSSES[name], OPS[f"{name}_forward"], f"distributed.{name}"
    # Every rank checks the options: the op would, but a rank without words does not call it.
    for option, accepted in op.options.items():
        value, condition = getattr(call, option, None), accepted
        if not isinstance(condition, Accepted):
            condition = one_of(condition)
        if value is not None and not condition.holds(value):
            raise ValueError(f"{title}: {option} must be {condition.text}, got {value!r}")
    prefix = loss.sharded.removesuffix("weight") if hasattr(call, "chunk_bytes") else None
    names = (*_WHOLES[name], *more)
    wholes = {tensor: getattr(call, tensor) for tensor in names if hasattr(call, tensor)}
    arguments = read_arguments(title, loss, call, wholes, prefix)
    local = {field: getattr(call, field) for field in op.arguments._fields if hasattr(call, field)}
    local |= {name: tensor for name, tensor in arguments.others.items() if name in local}
    if prefix is not None:
        head = arguments.head(call, prefix)
        local |= {f"{prefix}{n}": tensor for n, tensor in zip(HEAD, head, strict=True)}
        if "gradient_mask" in op.arguments._fields:
            local["gradient_mask"] = needed_gradients(head, call.reduction)
    else:
        local[loss.sharded] = arguments.sharded
    if "target" in local:
        arguments.check_target(local[loss.rows], local["target"])
    return arguments, local
