"""Operations between a model's head and its loss are recorded where the op computes them too, and
otherwise done by the model's own code to all logits."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from causal_models import Tiny, assert_same_gradients, assert_trains_alike, batch, gradients
from fused_families import VOCABULARY
from liger_ops.fusion import loss
from liger_ops.fusion.loss.calls import DeferringHead
from liger_ops.fusion.loss.deferred import deferral_of
from liger_ops.fusion.loss.options import ForwardLossOptions
from small_configs import HIDDEN, small


class Cap(nn.Module):
    def __init__(self, cap: float = 2.0) -> None:
        super().__init__()
        self.cap = cap

    def forward(self, logits: Tensor) -> Tensor:
        return torch.tanh(logits / self.cap) * self.cap


class Temperature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.t = nn.Parameter(torch.tensor(1.3))

    def forward(self, logits: Tensor) -> Tensor:
        return logits / self.t


class Schedule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, logits: Tensor) -> Tensor:
        return self.scale * logits


class Mask(nn.Module):
    def forward(self, logits: Tensor) -> Tensor:
        return logits.masked_fill(torch.arange(VOCABULARY) % 5 == 0, -1e4)


class Behind(Tiny):
    """A model with a module behind its head."""

    def __init__(self, post: nn.Module) -> None:
        super().__init__()
        self.post = post

    def logits(self, hidden: Tensor) -> Tensor:
        return self.post(self.head(hidden))


class OfModel(Tiny):
    """A model that scales logits by a tensor of its own."""

    def __init__(self, learned: bool) -> None:
        super().__init__()
        scale = torch.tensor(0.7)
        if learned:
            self.scale = nn.Parameter(scale)
        else:
            self.register_buffer("scale", scale)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden) * self.scale


class ByLength(Tiny):
    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.head(hidden)
        return logits * 0.5 if hidden.shape[1] > 6 else logits


class Number(Tiny):
    """A schedule in an attribute."""

    scale = 0.5

    def logits(self, hidden: Tensor) -> Tensor:
        return self.scale * self.head(hidden)


class Biased(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.added = nn.Parameter(torch.linspace(-1, 1, VOCABULARY))

    def logits(self, hidden: Tensor) -> Tensor:
        return self.added + self.head(hidden)


class Sliced(Tiny):
    """A forward that shifts by slices, and chooses rows."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
        hidden = self.body(input_ids)
        logits = self.head(hidden if isinstance(hidden, Tensor) else hidden.last_hidden_state)
        if labels is None:
            return {"logits": logits}
        shifted = logits[..., :-1, :].float()[:, -3:].contiguous()
        rows = shifted.view(-1, shifted.size(-1))
        value = nn.functional.cross_entropy(rows, labels[:, 1:][:, -3:].reshape(-1))
        return self.result(value, logits)


class InPlace(Tiny):
    """A write is seen in every view of the logits."""

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.head(hidden)
        flat, doubled = logits.view(-1, VOCABULARY), logits * 2
        logits *= 0.5
        return flat.view(logits.shape) + doubled


class WithoutGradient(Tiny):
    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.head(hidden)
        with torch.no_grad():
            fixed = 0.5 * logits
        return logits + fixed


def own(scale: Any = 1.0, softcap: float | None = None) -> dict[str, Any]:
    return {"logit_scale": scale, "softcap": softcap}


# A model, and the options with which it is fused or the reason that it is left.
CASES: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "cap": (lambda: Behind(Cap()), own(softcap=2.0)),
    "learned temperature": (
        lambda: Behind(Temperature()),
        "its post, a Temperature, applies div to its logits, with its parameter post.t",
    ),
    "buffer": (
        lambda: Behind(Schedule()),
        "its post, a Schedule, applies mul to its logits, with its buffer post.scale",
    ),
    "mask": (lambda: Behind(Mask()), "its post, a Mask, applies masked_fill to its logits"),
    "dropout": (
        lambda: Behind(nn.Dropout(0.5)),
        "its post, a Dropout, applies dropout to its logits",
    ),
    "norm": (
        lambda: Behind(nn.LayerNorm(VOCABULARY)),
        "its post, a LayerNorm, applies layer_norm to its logits, with its parameter post.weight",
    ),
    "two": (
        lambda: Behind(nn.Sequential(Cap(), nn.Dropout(0.5))),
        "its post, a Sequential, applies dropout to its logits",
    ),
    "the model's parameter": (
        lambda: OfModel(True),
        "its forward applies mul to its logits, with its parameter scale",
    ),
    "the model's buffer": (
        lambda: OfModel(False),
        "its forward applies mul to its logits, with its buffer scale",
    ),
    "branch on the length": (ByLength, own("0.5 or 1.0")),
    "number": (Number, own(0.5)),
    "bias": (Biased, own()),
    "slices": (Sliced, own()),
    "written in place": (InPlace, "its forward applies mul_ to its logits"),
    "without gradients": (WithoutGradient, "its forward applies mul to its logits"),
}


def assert_equal_steps(actual: Any, call: Any, model: Any, length: int, bound: float) -> None:
    """Loss and every gradient, with the same random numbers."""
    found = []
    for one, called in ((actual, call), (model, model)):
        torch.manual_seed(7)
        value = called(**batch(2, length))["loss"]
        found.append((value, gradients(one, value)))
    (value, grads), (expected, expected_grads) = found
    assert value.dtype is expected.dtype
    torch.testing.assert_close(value, expected, rtol=bound, atol=bound)
    assert_same_gradients(grads, expected_grads, bound=10 * bound)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_step_is_that_of_the_model(name: str, dtype: torch.dtype) -> None:
    """Fused or left by `fuse`, and where a module comes behind the head of a fused model later."""
    build, expected = CASES[name]
    torch.manual_seed(0)
    model = build().to(dtype)
    fused = copy.deepcopy(model)
    (finding,) = loss.fuse(fused).findings
    assert (finding.options if finding.used else finding.reason) == expected
    bound = {torch.float64: 1e-6}.get(dtype, 2e-6 if dtype is torch.float32 else 2e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for length in (4, 8):
            assert_equal_steps(fused, fused, model, length, bound)
        assert list(fused(**batch())) == ["loss", *([] if finding.used else ["logits"])]


@pytest.mark.parametrize("name", CASES)
def test_a_compiled_step_is_that_of_the_model(name: str) -> None:
    build, expected = CASES[name]
    torch.manual_seed(0)
    model = build()
    fused = copy.deepcopy(model)
    assert bool(loss.fuse(fused)) == isinstance(expected, dict)
    torch._dynamo.reset()
    compiled = torch.compile(fused, fullgraph=True, backend="eager")
    for length in (4, 8):
        if "dropout" in name or name == "two":
            assert compiled(**batch(2, length))["loss"].isfinite()
        else:
            assert_equal_steps(fused, compiled, model, length, 2e-6)


LATER = {name: case for name, case in CASES.items() if isinstance(case[1], str)}


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", [name for name in LATER if name not in ("dropout", "two")])
def test_code_that_changes_after_fuse(name: str, compiles: bool) -> None:
    """A model whose logits need no more than the op when it is fused, and do in a later step."""
    torch.manual_seed(0)
    model = LATER[name][0]()
    fused = copy.deepcopy(model)
    later, cls = fused.__dict__.get("_modules", {}).get("post"), type(fused)
    plain = type("Plain", (cls,), {"logits": Tiny.logits})
    fused.__class__ = plain
    if later is not None:
        fused.post = nn.Identity()
    assert loss.fuse(fused)
    plain.logits = cls.logits
    if later is not None:
        fused.post = later
    torch._dynamo.reset()
    call = torch.compile(fused, fullgraph=True, backend="eager") if compiles else fused
    with pytest.warns(
        UserWarning, match=r"computes its loss from all logits.*: its forward applies"
    ):
        assert_equal_steps(fused, call, model, 8, 2e-6)
    assert list(fused(**batch())) == ["loss", "logits"]


def test_schedules_are_followed() -> None:
    """A number that the model changes, and a buffer that a model scales its logits by since."""
    model, fused = Number(), Number()
    fused.load_state_dict(model.state_dict())
    assert loss.fuse(fused)
    for scale in (0.5, 0.25, 3.0):
        model.scale = fused.scale = scale
        assert_equal_steps(fused, fused, model, 8, 2e-6)
        assert list(fused(**batch())) == ["loss"]


ROWS: dict[str, Callable[[Any], Any]] = {
    "[:, :-1]": lambda x: x[:, :-1],
    "[..., 1:, :]": lambda x: x[..., 1:, :],
    "[:, -1]": lambda x: x[:, -1],
    "[1, ...]": lambda x: x[1, ...],
    "[:, :, :V]": lambda x: x[:, :, :VOCABULARY],
    "[:, :, None]": lambda x: x[:, :, None],
    "[mask]": lambda x: x[torch.arange(10).reshape(2, 5) % 3 == 0],
    "[[0, 1], [2, 3]]": lambda x: x[torch.tensor([0, 1]), torch.tensor([2, 3])],
    "[0, 0, 0, ...]": lambda x: x[0, 0, 0, ...],
    "[..., 3]": lambda x: x[..., 3],
    "[:, :, 1:]": lambda x: x[:, :, 1:],
    "view": lambda x: x.view(-1, x.size(-1)),
    "view, open": lambda x: x.view(x.shape[0] * x.shape[1], -1),
    "reshape": lambda x: torch.reshape(x, (5, 2, VOCABULARY)),
    "reshape columns": lambda x: x.reshape(VOCABULARY, 10),
    "flatten": lambda x: x.flatten(0, 1),
    "flatten all": lambda x: torch.flatten(x),
    "twice": lambda x: x[:, 1:].flatten(0, 1)[2:7],
    "sum": lambda x: x + torch.arange(5.0)[:, None],
    "reversed": lambda x: 1 - x,
    "list": lambda x: torch.stack([x, x])[0],
    "equal": lambda x: (x == x).float(),
    "power": lambda x: x**2,
    "floor": lambda x: torch.div(x, 0.3, rounding_mode="floor"),
    "doubled summand": lambda x: x.add(torch.arange(float(VOCABULARY)), alpha=2),
    "copied": lambda x: x.to(torch.float32, copy=True),
}


@pytest.mark.parametrize("operate", ROWS.values(), ids=ROWS)
def test_operations_on_rows(operate: Callable[[Any], Any]) -> None:
    """Each gives what it gives for a tensor, and a cross-entropy of what stays deferred too."""
    torch.manual_seed(0)
    layer, hidden = nn.Linear(8, VOCABULARY), torch.randn(2, 5, 8)
    said: list[str] = []
    head = DeferringHead(
        layer, [layer], ForwardLossOptions(), lambda reason, operands: said.append(reason)
    )
    expected = operate(layer(hidden))
    logits = operate(head(hidden))
    assert logits.shape == expected.shape
    assert isinstance(logits, Tensor)
    if deferral_of(logits) is None:
        assert len(said) == 1 and torch.equal(logits, expected)
        return
    assert not said
    rows = expected.reshape(-1, VOCABULARY)
    labels = torch.arange(len(rows))
    loss_value = nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), labels)
    torch.testing.assert_close(loss_value, nn.functional.cross_entropy(rows, labels))
    assert not said
    torch.testing.assert_close(logits.clone(), expected)
    assert said == ["its forward applies clone to its logits"]


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    @staticmethod
    def backward(ctx: Any, *grad: Any) -> Any:
        return None, None


def test_an_autograd_function_has_to_get_a_tensor() -> None:
    """A gradient would be lost in silence."""
    fused = Tiny()
    loss.fuse(fused)
    fused.loss_function = lambda logits, labels, *args: Sum.apply(logits, labels)
    with pytest.raises(RuntimeError, match="skip_logits=False keeps them"):
        fused(**batch())
    assert fused(**batch(), skip_logits=False)["loss"].requires_grad
    model = Tiny()
    model.loss_function = fused.loss_function
    (finding,) = loss.fuse(model).left
    assert "a torch.autograd.Function takes them" in finding.reason


def test_methods_that_an_instance_replaces_are_called() -> None:
    model = Tiny()
    fused = copy.deepcopy(model)
    loss.fuse(fused)
    for one in (model, fused):
        one.logits = lambda hidden, one=one: one.head(hidden).clamp(max=0.1)
    with pytest.warns(UserWarning, match="its forward applies clamp to its logits"):
        assert_equal_steps(fused, fused, model, 8, 2e-6)


def test_autocast_is_that_of_the_head() -> None:
    """A loss that turns autocast off has logits of a head that was called in it."""

    class Off(Tiny):
        @staticmethod
        def loss_function(logits: Tensor, *args: Any) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return Tiny.loss_function(logits, *args)

    model, fused = Off(), Off()
    fused.load_state_dict(model.state_dict())
    assert loss.fuse(fused)
    with torch.autocast("cpu", torch.bfloat16):
        assert_equal_steps(fused, fused, model, 8, 2e-3)


def test_a_graph_that_breaks_between_head_and_loss() -> None:
    class Breaks(Tiny):
        def logits(self, hidden: Tensor) -> Tensor:
            logits = 0.5 * self.head(hidden)
            torch._dynamo.graph_break()
            return torch.tanh(logits)

    model, fused = Breaks(), Breaks()
    fused.load_state_dict(model.state_dict())
    assert loss.fuse(fused)
    torch._dynamo.reset()
    assert_equal_steps(fused, torch.compile(fused, backend="eager"), model, 8, 2e-6)


def test_a_call_leaves_nothing_behind() -> None:
    """No circle of references, which would hold hidden states until the next collection."""
    fused = Behind(Cap())
    loss.fuse(fused)
    held: list[Any] = []
    fused.head.weight.requires_grad_(False)
    fused.body.register_forward_hook(lambda module, args, y: held.append(weakref.ref(y)))
    gc.collect(), gc.disable()
    try:
        with torch.no_grad():
            fused(**batch()), fused(**batch(), skip_logits=False, reduction="sum")
        assert [one() for one in held] == [None, None]
    finally:
        gc.enable()


def inkling() -> nn.Module:
    return transformers.Inkling2ForCausalLM(small(transformers.Inkling2TextConfig()))


def multimodal_inkling() -> nn.Module:
    config = small("inkling2", vision_config={"text_hidden_size": HIDDEN})
    return transformers.Inkling2ForConditionalGeneration(config)


@pytest.mark.skipif(not hasattr(transformers, "Inkling2Config"), reason="an older transformers")
@pytest.mark.parametrize("build", [inkling, multimodal_inkling])
def test_a_cap_that_is_a_module(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = build().train()
    with torch.no_grad():
        model.lm_head.weight.mul_(100)
    fused = copy.deepcopy(model)
    (finding,) = loss.fuse(fused).fused
    assert finding.options == own(softcap=30.0)
    assert model(**batch()).logits.abs().max() > 10
    assert_trains_alike(fused, model, **batch())
