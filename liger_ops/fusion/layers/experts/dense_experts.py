"""Layers whose experts each compute every token, as in Llama 4: the forward calls moe_experts.

The new forward calls the same children, the router included, except for the experts. The router's
code is traced with the layer's, which proves that a token has no more scores than the op computes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ....ops.experts.moe_experts import moe_experts
from ... import sharding
from ...planning import FusionPlan
from ...probing import NotAnOp
from ...sharding import shape_of
from ...trace import ANY_SIZES
from ..gated import takes_one_argument
from ..installed import ModuleFacts, OpCaller
from ..kind import Kind, argument_obstacle, has_state, obstacle, parameter_obstacle, state_obstacle
from ..module_trace import Case, FailsInTrace, names_of
from ..program import Program, ProgramStep


class DenseExperts(Kind):
    """Layers with such experts, the same in every dtype and mode. A finding names the experts, not
    the layer.

    Attributes:
        taken: the experts in layers that are fused.
        reasons: for other experts, the reason that their layer is left.
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
        return (
            obstacle(module)
            or state_obstacle(module)
            or argument_obstacle(module, takes_one_argument)
        )

    def called_children(self, module: nn.Module) -> Collection[str]:
        children = module.named_children()
        return [name for name, child in children if has_state(child) and not child._parameters]

    def traced_children(self, module: nn.Module) -> Collection[str]:
        experts = _experts(module)
        children = module.named_children()
        return [name for name, child in children if child._parameters and name != experts]

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

    def look(self, plan: FusionPlan, name: str, module: nn.Module) -> None:
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
    def caller(facts: ModuleFacts, op: ProgramStep, i: int) -> OpCaller:
        def experts(x: Tensor, gate_up: Tensor, down: Tensor, *rest: Any) -> Tensor | None:
            are_plain = type(gate_up) is type(down) is Tensor
            return moe_experts(x, gate_up, down, *rest) if are_plain else None

        return experts


def _experts(module: nn.Module) -> str:
    """Return the name of the only child with two weights of three dimensions and no `_apply_gate`,
    or "" if there is not exactly one."""
    found = [
        name
        for name, child in module.named_children()
        if not hasattr(type(child), "_apply_gate")
        and [len(shape_of(parameter)) for parameter in child.parameters(recurse=False)].count(3)
        == 2
    ]
    return found[0] if len(found) == 1 else ""
