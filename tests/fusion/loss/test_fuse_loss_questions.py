"""Questions of a model's code about its logits, itself and its head: each is answered as in the
untouched model, or the loss is left with its reason."""

from __future__ import annotations

import collections.abc
import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from causal_models import Tiny, assert_same_gradients, batch, causal_loss, gradients
from fused_families import VOCABULARY
from liger_ops.fusion import loss


@functools.singledispatch
def kind(x: Any) -> float:
    return 1.0


@kind.register(Tensor)
def _(x: Any) -> float:
    return 2.0


@runtime_checkable
class Fillable(Protocol):
    def masked_fill(self, mask: Any, value: Any) -> Any: ...


def pattern(x: Any) -> float:
    match x:
        case Tensor():
            return 2.0
    return 1.0


class Asking(Tiny):
    """The loss is multiplied by the answer to a question."""

    calls = 0

    def __init__(self, question: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.factor, self.own, self.question = 1.7, [self], question

    @functools.cached_property
    def late(self) -> float:
        return 1.5

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
        hidden = self.body(input_ids)
        logits = self.head(hidden if isinstance(hidden, Tensor) else hidden.last_hidden_state)
        answer = self.question(self, logits)
        value = causal_loss(logits, labels, VOCABULARY)
        return {"loss": value * (1 + answer), "logits": logits}


def temporary(s: Any, x: Any) -> float:
    s.tmp = 3.0
    value = s.tmp
    del s.tmp
    return value


def counted(s: Any, x: Any) -> int:
    s.calls += 1
    return s.calls


def of_a_local(s: Any, x: Any) -> bool:
    logits = x.float()
    return type(logits) is Tensor


def kept(s: Any, x: Any) -> float:
    s.last = x
    return 1.0


COMPILED = {
    "isinstance": lambda s, x: isinstance(x, Tensor),
    "of several": lambda s, x: isinstance(x, (list, Tensor)) and not isinstance(x, nn.Module),
    "is_tensor": lambda s, x: torch.is_tensor(x),
    "pattern": lambda s, x: pattern(x),
    "identity": lambda s, x: 4 * (x.float() is x) + 2 * (x.contiguous() is x) + (x is not None),
    "vars": lambda s, x: vars(s).get("factor", 1.0),
    "__dict__": lambda s, x: s.__dict__["factor"],
    "hasattr": lambda s, x: 2 * hasattr(s, "factor") + hasattr(s, "nothing") + hasattr(x, "no"),
    "parameters": lambda s, x: len(list(s.parameters())),
    "itself": lambda s, x: 2 * (s is s.own[0]) + (id(s) == id(s.own[0])),
    "its head": lambda s, x: isinstance(s.head, nn.Linear) + (s.head is s._modules["head"]),
    "temporary": temporary,
    "counted": counted,
}  # fmt: skip
EAGER = {
    **COMPILED,
    "state_dict": lambda s, x: len(s.state_dict()),
    "name": lambda s, x: len(type(x).__name__ + x.__class__.__name__ + type(s).__name__),
    # As the recorder of outputs in transformers asks it.
    "class as text": lambda s, x: len(str(s.__class__) + str(type(x)) + repr(s.head.__class__)),
    "singledispatch": lambda s, x: kind(x),
    "protocol": lambda s, x: isinstance(x, Fillable) + isinstance(x, collections.abc.Sequence),
    "parameter": lambda s, x: isinstance(x, nn.Parameter) + isinstance(x, torch.FloatTensor),
    "vars of logits": lambda s, x: len(vars(x)),
    "key": lambda s, x: {x: 2.0}[x] + {s: 2.0}[s] + weakref.WeakKeyDictionary({s: 1.0})[s],
    "weakref": lambda s, x: weakref.ref(x)() is x,
    "size": lambda s, x: len(x) + x.dim() + x.ndim + x.size(-1) + (x.dtype is torch.float32),
    "compared with None": lambda s, x: (x != None) - 2 * (x == None),  # noqa: E711
    "default": lambda s, x: getattr(x, "nothing", 3.0) + callable(x),
    "cached": lambda s, x: s.late * s.late,
    "children": lambda s, x: s.head in list(s.children()) and len(vars(s.head)),
}  # fmt: skip
OF_CLASS = "its forward asks for the class of "
LEFT: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "type is": (lambda s, x: type(x) is Tensor, OF_CLASS + "its logits"),
    "of a local": (of_a_local, OF_CLASS + "its logits"),
    "type in": (lambda s, x: type(x) in (Tensor, nn.Parameter), OF_CLASS + "its logits"),
    "__class__": (lambda s, x: x.__class__ is Tensor, OF_CLASS + "its logits"),
    "overrides": (lambda s, x: torch.overrides.has_torch_function((x,)), OF_CLASS + "its logits"),
    "own type": (lambda s, x: type(s) is Asking, OF_CLASS + "itself"),
    "own __class__": (lambda s, x: s.__class__ is Asking, OF_CLASS + "itself"),
    "type of the head": (lambda s, x: type(s.head) is nn.Linear, OF_CLASS + "its head"),
    "kept": (kept, "its forward keeps its logits, in last"),
    "dir": (lambda s, x: len(dir(x)), "its forward applies dir to its logits"),
    "repr": (lambda s, x: len(repr(x)), "its forward applies repr to its logits"),
    "gradient": (lambda s, x: x.requires_grad, "its forward applies requires_grad to its logits"),
    "pointer": (lambda s, x: x.data_ptr() > 0, "its forward applies data_ptr to its logits"),
    "strides": (lambda s, x: x.stride(0), "its forward applies stride to its logits"),
    "numpy": (lambda s, x: x.detach().numpy().sum(), "its forward applies detach to its logits"),
    "rows": (lambda s, x: sum(row.sum() for row in x), "applies unbind to its logits"),
    "truth": (lambda s, x: bool((x > 0).any()), "its forward applies gt to its logits"),
}  # fmt: skip


def pair(question: Callable[[Any, Any], Any]) -> tuple[Asking, Asking]:
    model, fused = Asking(question), Asking(question)
    fused.load_state_dict(model.state_dict())
    return model, fused


def assert_equal(fused: Any, call: Any, model: Any) -> Any:
    output, expected = call(**batch()), model(**batch())
    torch.testing.assert_close(output["loss"], expected["loss"])
    assert_same_gradients(gradients(fused, output["loss"]), gradients(model, expected["loss"]))
    return output


@pytest.mark.parametrize("question", EAGER.values(), ids=EAGER)
def test_a_question_is_answered(question: Callable[[Any, Any], Any]) -> None:
    model, fused = pair(question)
    assert loss.fuse(fused).fused
    for _ in range(2):
        assert list(assert_equal(fused, fused, model)) == ["loss"]
    assert vars(fused).keys() == vars(model).keys()


def test_questions_are_answered_in_compiled_code() -> None:
    """In one graph, where each has a weight of its own."""

    def every(s: Any, x: Any) -> float:
        return sum(3.0**i * question(s, x) for i, question in enumerate(COMPILED.values()))

    model, fused = pair(every)
    loss.fuse(fused)
    torch._dynamo.reset()
    call = torch.compile(fused, fullgraph=True, backend="eager")
    assert list(assert_equal(fused, call, model)) == ["loss"]


@pytest.mark.parametrize(("question", "reason"), LEFT.values(), ids=LEFT)
def test_what_asks_another_question_is_left(
    question: Callable[[Any, Any], Any], reason: str
) -> None:
    _, fused = pair(question)
    report = loss.fuse(fused)
    assert not report and reason in report.left[0].reason


def test_code_that_asks_for_the_class_since_raises() -> None:
    model = Tiny()
    loss.fuse(model)

    def asks(logits: Tensor, *args: Any) -> Tensor:
        return causal_loss(logits, *args) * (1.0 if type(logits) is Tensor else 2.0)

    model.loss_function = asks
    with pytest.raises(RuntimeError, match="asks for their class takes them; skip_logits=False"):
        model(**batch())


def test_logits_that_code_keeps_since_are_not_those_of_other_weights() -> None:
    model, fused = pair(lambda s, x: 1.0)
    assert loss.fuse(fused)
    model.question = fused.question = kept
    assert_equal(fused, fused, model)
    nn.init.zeros_(fused.head.weight)
    with pytest.raises(RuntimeError, match="code that keeps them after the call takes them"):
        fused.last.sum()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_of_head_and_loss(use_reentrant: bool) -> None:
    class Checkpointed(Tiny):
        def value(self, hidden: Tensor, labels: Tensor) -> Tensor:
            return causal_loss(self.head(hidden), labels, VOCABULARY)

        def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
            hidden = self.body(input_ids)
            hidden = hidden if isinstance(hidden, Tensor) else hidden.last_hidden_state
            return {"loss": checkpoint(self.value, hidden, labels, use_reentrant=use_reentrant)}

    model, fused = Checkpointed(), Checkpointed()
    fused.load_state_dict(model.state_dict())
    (finding,) = loss.fuse(fused).findings
    assert finding.used or finding.reason == "its forward calls its head in a checkpoint"
    assert_equal(fused, fused, model)


def test_a_head_without_gradients_beside_a_loss_with_them() -> None:
    class Frozen(Tiny):
        freezes = False

        def forward(self, input_ids: Tensor, labels: Any = None, **kwargs: Any) -> Any:
            hidden = self.body(input_ids)
            hidden = hidden if isinstance(hidden, Tensor) else hidden.last_hidden_state
            with torch.set_grad_enabled(not self.freezes):
                logits = self.head(hidden.flatten(0, 1))
            value = nn.functional.cross_entropy(logits, labels.flatten())
            return {"loss": value + self.body.weight.sum(), "logits": logits}

    model, fused = Frozen(), Frozen()
    fused.load_state_dict(model.state_dict())
    assert loss.fuse(fused)
    model.freezes = fused.freezes = True
    with pytest.warns(UserWarning, match="its head is called without gradients"):
        assert_equal(fused, fused, model)
