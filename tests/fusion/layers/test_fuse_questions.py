"""Questions of a module's code while it is traced: each is answered as in a step, or the module is
left with its reason."""

from __future__ import annotations

import copy
import cProfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from liger_ops import fuse


class Norm(nn.Module):
    def __init__(self, question: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.weight, self.factor = nn.Parameter(torch.rand(8) + 0.5), 1.5
        self.question = question

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        y = self.weight * normed.to(x.dtype)
        return y if self.question(self, x) else torch.tanh(y)


class MLP(nn.Module):
    def __init__(self, question: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(8, 16, bias=False), nn.Linear(8, 16, bias=False)
        self.down, self.act, self.factor = nn.Linear(16, 8), nn.SiLU(), 1.5
        self.question = question

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.act(self.gate(x)) * self.up(x))
        return y if self.question(self, x) else torch.tanh(y)


def asks(x: Any, *others: Any) -> Any:
    return x if type(x) is Tensor else torch.tanh(x)


@torch.overrides.wrap_torch_function(lambda x: (x,))
def overridable(x: Tensor) -> bool:
    """Ask within a call that `__torch_function__` is given."""
    return asks(x) is x


def distance(s: nn.Module, x: Tensor) -> bool:
    """Ask within a function of PyTorch, which is given the function that asks."""
    loss = nn.functional.triplet_margin_with_distance_loss
    return loss(x, x, x, distance_function=asks) is not None


class Asking(Tensor):
    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        own = super().__torch_function__
        return asks(args[1]) if function is torch.mul else own(function, types, args, kwargs)


ONE = torch.ones(()).as_subclass(Asking)
OF_TENSOR, OF_MODULE = "it asks for the class of a tensor", "it asks for the class of a module"
OF_DICT = "it reads the __dict__ of itself"
# A question whose answer is yes, and the reason if what asks it is left.
QUESTIONS: dict[str, tuple[Callable[[Any, Any], Any], str | None]] = {
    "isinstance": (lambda s, x: isinstance(x, Tensor) and torch.is_tensor(x), None),
    "isinstance of itself": (lambda s, x: isinstance(s, (Norm, MLP)), None),
    "name": (lambda s, x: type(s).__name__ in ("Norm", "MLP"), None),
    "hasattr": (lambda s, x: not hasattr(s, "other"), None),
    "getattr": (lambda s, x: getattr(s, "other", None) is None, None),
    "identity": (lambda s, x: s is s and x is x and id(s) == id(s), None),
    "type": (lambda s, x: type(x) is Tensor, OF_TENSOR),
    "__class__": (lambda s, x: x.__class__ is Tensor, OF_TENSOR),
    "in an overridable function": (lambda s, x: overridable(x), OF_TENSOR),
    "in a function of PyTorch": (distance, OF_TENSOR),
    "in a subclass": (lambda s, x: torch.mul(ONE, x) is x, OF_TENSOR),
    "requires_grad": (lambda s, x: x.requires_grad, "it reads requires_grad of a tensor"),
    "type of itself": (lambda s, x: type(s) in (Norm, MLP), OF_MODULE),
    "__class__ of itself": (lambda s, x: s.__class__ in (Norm, MLP), OF_MODULE),
    "vars": (lambda s, x: vars(s)["factor"] == 1.5, OF_DICT),
    "in __dict__": (lambda s, x: "other" not in s.__dict__, OF_DICT),
    "dir": (lambda s, x: "other" not in dir(s), OF_DICT),
}  # fmt: skip
OF_CHILDREN: dict[str, tuple[Callable[[Any, Any], Any], str | None]] = {
    "isinstance": (
        lambda s, x: isinstance(s.gate, nn.Linear), "it asks for the class of its gate",
    ),
    "type": (lambda s, x: type(s.gate) is nn.Linear, OF_MODULE),
    "parameters": (lambda s, x: len(list(s.parameters())) > 0, "parameters in its gate"),
    "hasattr": (lambda s, x: hasattr(s.gate, "in_features"), "it reads in_features of its gate"),
    "getattr": (lambda s, x: getattr(s.gate, "bias", 1) is None, "it reads bias of its gate"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:liger_ops:UserWarning")
@pytest.mark.parametrize(
    ("cls", "question", "reason"),
    [
        *(pytest.param(Norm, *case, id=f"norm-{name}") for name, case in QUESTIONS.items()),
        *(pytest.param(MLP, *case, id=f"mlp-{name}") for name, case in QUESTIONS.items()),
        *(pytest.param(MLP, *case, id=f"child-{name}") for name, case in OF_CHILDREN.items()),
    ],
)
def test_a_question_has_its_answer(
    cls: Any, question: Callable[[Any, Any], Any], reason: str | None
) -> None:
    torch.manual_seed(0)
    model, x = cls(question), torch.randn(3, 8, requires_grad=True)
    fused = copy.deepcopy(model)
    (finding,) = (one for one in fuse(fused).findings if one.class_name == cls.__name__)
    assert bool(finding.used) is (reason is None) and (reason or "") in (finding.reason or "")
    torch.testing.assert_close(fused(x), model(x))
    # Another answer to some of them.
    for one in (model, fused):
        one.factor, one.other = 2.5, 1.0
    torch.testing.assert_close(fused(x), model(x))


def test_a_profiler_sees_the_code_after_the_trace() -> None:
    model, profiler = Norm(lambda s, x: True), cProfile.Profile()
    profiler.enable()
    report = fuse(model)
    asks(torch.ones(8))
    profiler.disable()
    assert report.fused and asks.__code__ in {entry.code for entry in profiler.getstats()}
