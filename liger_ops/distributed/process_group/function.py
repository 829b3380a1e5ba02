"""The functions of process groups, each of which has the arguments of an op, and a group."""

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
from .arguments import Arguments, arguments

Function = TypeVar("Function", bound=Callable[..., Any])

# The arguments that differ from the op's.
_OF_RANKS = """
    x: (..., D), floating point: the whole, or the rank's part along `sequence_dim`, of which every
        rank has as many rows; or a DTensor with the placement Replicate() or Shard(d) of a
        dimension but the last, whose rows need not divide.
    weight: (V / ranks, D), the rank's words; or a DTensor (V, D) with the placement Shard(0).
    target: (...), int64 or int32, of all tokens and the whole vocabulary; each is ignore_index, or
        from 0 to V - 1.
    bias: (V / ranks,); or a DTensor (V,) with the placement Shard(0).
    class_weight: (V,), the weight of every word.
    lora_a: (R, D), floating point, the whole on every rank, or a DTensor with the placement
        Replicate(): with lora_b, a LoRA that is added to weight. Its gradient is whole on every
        rank.
    lora_b: (V / ranks, R), the rank's words; or a DTensor (V, R) with the placement Shard(0).
    group: the process group whose ranks have the words, in the order of the ranks; None for
        DTensors.
    vocab_size: V; None for DTensors.
    sequence_dim: the dimension along which x is sharded, or None if it is whole; None for DTensors:
        then x's placement says it, and an x that is no DTensor is whole.
"""
_SECTIONS = {
    "Raises": """    TypeError: a tensor has another dtype.
    ValueError: a shape, a placement, a mesh or an option is not as above, or a tensor that has no
        gradient requires one.""",
    "Source": """    Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models
    Using Model Parallelism", 2019.""",
}

# The arguments of each op of which every rank has the whole.
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
    """A function with the parameters of the decorated one, whose call it gives to `compute`, after
    its name. The documentation of the arguments that it does not describe is the op's."""

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

        own, of_op = sections(function.__doc__), sections(COMPOSED[name].__doc__)
        texts = entries(of_op["Args"]) | entries(_OF_RANKS) | entries(own.get("Args", ""))
        own["Args"] = described(parameters, texts)
        body = {"": own.pop(""), "Args": own.pop("Args"), **own, **_SECTIONS}
        public.__doc__ = "\n\n".join(f"{k}:\n{v}" if k else v for k, v in body.items())
        return public  # type: ignore[return-value]

    return decorate


def read(name: str, call: Any, *more: str) -> tuple[Arguments, dict[str, Any]]:
    """The arguments of a call as one rank has them, and those of the op `<name>_forward`. The
    arguments in `more` are whole, and not the op's."""
    loss, op, title = SHARDED_LOSSES[name], OPS[f"{name}_forward"], f"distributed.{name}"
    # Every rank checks what the op of each would not, as it is not called without words.
    for option, accepted in op.options.items():
        value, condition = getattr(call, option, None), accepted
        if not isinstance(condition, Accepted):
            condition = one_of(condition)
        if value is not None and not condition.holds(value):
            raise ValueError(f"{title}: {option} must be {condition.text}, got {value!r}")
    prefix = loss.sharded.removesuffix("weight") if hasattr(call, "chunk_bytes") else None
    names = (*_WHOLES[name], *more)
    wholes = {tensor: getattr(call, tensor) for tensor in names if hasattr(call, tensor)}
    given = arguments(title, loss, call, wholes, prefix)
    local = {field: getattr(call, field) for field in op.arguments._fields if hasattr(call, field)}
    local |= {name: tensor for name, tensor in given.others.items() if name in local}
    if prefix is not None:
        head = given.head(call, prefix)
        local |= {f"{prefix}{n}": tensor for n, tensor in zip(HEAD, head, strict=True)}
        if "gradient_mask" in op.arguments._fields:
            local["gradient_mask"] = needed_gradients(head, call.reduction)
    else:
        local[loss.sharded] = given.sharded
    if "target" in local:
        given.check_target(local[loss.rows], local["target"])
    return given, local
