"""Make the functions over process groups, each of which has the arguments of an op, and a group."""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any, TypeVar

from ...library import COMPOSED
from ...nn.derived import described, entries, sections

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
