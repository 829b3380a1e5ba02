"""A layer whose experts each compute every token, as Llama 4's: it calls moe_experts.

The new forward calls the same children, the router too, but for the experts. That a token has no
more scores than the op computes is proved from the router's code, which is traced with the layer's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ....ops.experts.moe_experts import moe_experts
from ... import sharding
from ...planning import Plan
from ...probing import NotAnOp
from ...sharding import shape_of
from ...trace import ANY_SIZES
from ..gated import takes_one
from ..installed import Called, Facts
from ..kind import Kind, argument_obstacle, has_state, obstacle, parameter_obstacle, state_obstacle
from ..module_trace import Case, FailsInTrace, names_of
from ..program import Program, Step


class DenseExperts(Kind):
    """It is the same in every dtype and mode. A finding is of the experts, not of the layer.

    taken: experts in a layer that is fused. reasons: why the layer of others is left.
    """

    name = "dense experts"
    title = "gated activation"
    rewrites = ops = ("moe_experts",)
    functions = (
        "add_", "multiply", "ones_like", "reshape", "sum", "topk", "transpose", "unsqueeze",
    )  # fmt: skip
    returns = tuple

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.taken: set[nn.Module] = set()
        self.reasons: dict[nn.Module, str] = {}

    def obstacle(self, module: nn.Module) -> str | None:
        name = _experts(module)
        experts = module.get_submodule(name)
        if not sharding.is_held_by_fsdp(experts) and (
            reason := parameter_obstacle(experts, f"{name}.")
        ):
            return reason
        return obstacle(module) or state_obstacle(module) or argument_obstacle(module, takes_one)

    def called(self, module: nn.Module) -> Collection[str]:
        children = module.named_children()
        return [name for name, one in children if has_state(one) and not one._parameters]

    def kept(self, module: nn.Module) -> Collection[str]:
        experts = _experts(module)
        children = module.named_children()
        return [name for name, one in children if one._parameters and name != experts]

    def cases(self, module: nn.Module, form: Any) -> Iterator[Case]:
        (name,) = names_of(module.forward)
        first = next(iter(module.get_submodule(_experts(module)).parameters()))
        for dtype, training in (
            (torch.bfloat16, True), (torch.bfloat16, False), (torch.float16, True),
            (torch.float32, False), (torch.float64, True),
        ):  # fmt: skip
            rows = [ANY_SIZES[n] for n in ((2, 3) if training else (4, 5))]
            shapes = {name: (*rows, shape_of(first)[1])}
            yield Case(shapes, {name: dtype}, dtype, training=training)

    def options(self, program: Program) -> dict[str, Any]:
        return {"activation": program.ops[0].options()["activation"]}

    def look(self, plan: Plan, name: str, module: nn.Module) -> None:
        experts = _experts(module)
        if not experts:
            return
        child = module.get_submodule(experts)
        if not self.is_fused(name, module):
            try:
                facts = self.facts(module)
                facts.assumptions.check(module)
            except FailsInTrace:
                return
            except NotAnOp as reason:
                self.reasons[child] = str(reason)
                return
            where = f"{name}.{experts}" if name else experts
            plan.fuse(where, child, "moe_experts", self.options(facts.program))
            plan.changes.append(lambda: self.install(module, facts))
        self.taken.add(child)

    @staticmethod
    def caller(facts: Facts, op: Step, i: int) -> Called:
        def experts(x: Tensor, gate_up: Tensor, down: Tensor, *rest: Any) -> Tensor | None:
            are_plain = type(gate_up) is type(down) is Tensor
            return moe_experts(x, gate_up, down, *rest) if are_plain else None

        return experts


def _experts(module: nn.Module) -> str:
    """The child with two weights of matrices and no `_apply_gate`, or "" if that is not one."""
    found = [
        name
        for name, child in module.named_children()
        if not hasattr(type(child), "_apply_gate")
        and [len(shape_of(one)) for one in child.parameters(recurse=False)].count(3) == 2
    ]
    return found[0] if len(found) == 1 else ""
