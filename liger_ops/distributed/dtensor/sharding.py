"""Registration of the sharding rules with DTensor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import register_sharding

from ...library import OPS
from ...torch_private import op_schema
from .rules import Rule, rule


def register_rules() -> None:
    """Register the rule of every op.

    A rule depends on every argument: on which tensors are None, and on strings such as the
    reduction. By default DTensor's cache of rules distinguishes calls by their tensors alone, and
    would return the placements of a sum for a mean.
    """
    propagator = DTensor._op_dispatcher.sharding_propagator
    for name, op in OPS.items():
        register_sharding(op.overload)(partial(_sharding, name))
        propagator.op_to_schema_info[op.overload] = op_schema.RuntimeSchemaInfo(
            static_argnum=0, needs_pytree=True
        )
        returns = op.schema.returns
        if len(returns) > 1 and not isinstance(returns[0].type, torch.TensorType):
            strategies = propagator.op_strategy_funcs
            strategies[op.overload] = partial(_for_each_result, strategies[op.overload])


def _sharding(name: str, *args: object) -> Rule:
    return rule(name, args)


class _NotComputed(op_schema.OpSpec):
    """The placements of a call's arguments, for a result that is None."""

    @property
    def output_spec(self) -> Any:
        return None


def _for_each_result(strategy: Callable[[Any], Any], schema: Any) -> op_schema.TupleStrategy:
    """Return a strategy for each result of an op whose first result is optional, as a gradient is:
    from a common strategy, DTensor would drop the specs of the results. As the costs are equal, all
    choose the same placements."""
    specs = strategy(schema).strategies

    def of_result(i: int) -> op_schema.OpStrategy:
        spec_class = _NotComputed if specs[0].output_specs[i] is None else op_schema.OpSpec
        return op_schema.OpStrategy(
            [
                spec_class(
                    s.output_specs[i] or s.input_specs[0], s.input_specs, s.redistribute_cost
                )
                for s in specs
            ]
        )

    return op_schema.TupleStrategy([of_result(i) for i in range(len(specs[0].output_specs))])
