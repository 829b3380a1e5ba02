"""What a causal language model computes from its hidden states, found by running its forward.

A stand-in for the model runs on the CPU: it has the model's own forward and attributes, and stubs
for children. The body returns hidden states of a few columns, and the head is a small linear layer
with the model's vocabulary.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .loss_head import child_of, head_of
from .loss_output import drop
from .loss_value import CausalLoss
from .loss_view import view_class, view_of, without_logits
from .probing import DEVICE, NotAnOp, dtype_name, first_line, undisturbed, uniform

BATCH, LENGTH, HIDDEN = 2, 4, 4

# Two orders of summing over a vocabulary in float32 differ by less. Measured at 128256 classes: the
# losses 1e-7, the gradients of hidden states 1.2e-5, of which either has 1e-5 to float64.
BOUND = 1e-5
GRADIENT_BOUND = 2e-4

# Sizes of logits: the scale shows on the tiny ones, the cap on the huge ones.
TINY, HUGE = 2.0**-20, 2.0**30
SIZES = (TINY, 1.0, 30.0, 400.0)


def probe(model: nn.Module, path: str) -> CausalLoss:
    """Find the cross-entropy that a causal language model computes.

    First its logits as a function of what its head returns: the scale and the cap are measured, and
    checked on logits of all sizes. Then the loss, its gradients, and everything else that the
    model's forward returns, are compared between the model as it is and the model with its head and
    loss fused, in every way that a loss is asked for: with labels of which one is ignored, and with
    num_items_in_batch, shift_labels, attention_mask and ignore_index.

    Nothing of the model is changed, no device but the CPU is used, and the state of no random
    number generator changes.

    Args:
        model: a model with `loss_function`, on any device, meta too.
        path: to its head, a torch.nn.Linear, of modules whose forward is called.

    Raises:
        NotAnOp: the model computes another loss, or does more with its logits; the text says what.
    """
    with undisturbed():
        return _Probe(model, path).run()


class _Probe:
    def __init__(self, model: nn.Module, path: str) -> None:
        self.model = model
        self.path = path
        head = head_of(model, path, sharded=True)
        if isinstance(head, str):
            raise NotAnOp(head)
        self.head = head
        self.vocabulary = head.weight.shape[0]
        self.forward: Callable[..., Any] = type(model).forward
        self.parameters = inspect.signature(self.forward).parameters
        self.view = view_class(type(model))
        generator = torch.Generator(DEVICE).manual_seed(0)
        self.ids, self.labels, self.other_labels = torch.randint(
            self.vocabulary, (3, BATCH, LENGTH), generator=generator, device=DEVICE
        )
        self.labels[0, 2] = -100

    def run(self) -> CausalLoss:
        loss_function: Any = self.model.loss_function
        if not inspect.isfunction(loss_function):
            raise NotAnOp(f"its loss_function is a {type(loss_function).__name__}, not a function")
        if "skip_logits" in self.parameters:
            raise NotAnOp("its forward has a skip_logits of its own")
        scale, softcap = self.logit_options()
        loss = self.labels_of(CausalLoss(self.path, loss_function, scale, softcap))
        for arguments in self.ways_to_ask():
            self.compare(loss, arguments)
        dtype = self.plain(torch.bfloat16, {}).loss.dtype
        if dtype is not torch.float32:
            raise NotAnOp(f"its loss is {dtype_name(dtype)} where the model is bfloat16")
        return loss

    def labels_of(self, loss: CausalLoss) -> CausalLoss:
        """Which labels the loss is of."""
        plain = self.plain(torch.float32, {})
        for shifts in (True, False):
            tried = replace(loss, shifts=shifts, output_class=type(plain.output))
            if _near(self.fused(tried, {}).loss, plain.loss):
                break
        takes = False
        if self.takes("shift_labels"):
            given = self.plain(torch.float32, {"shift_labels": self.other_labels}).loss
            takes = not _near(given, plain.loss)
        return replace(tried, takes_shift_labels=takes)

    def takes(self, name: str) -> bool:
        """Whether the forward takes an argument of that name."""
        takes_any = any(p.kind is p.VAR_KEYWORD for p in self.parameters.values())
        return takes_any or name in self.parameters

    def logit_options(self) -> tuple[float, float | None]:
        x = uniform((BATCH, LENGTH, self.vocabulary), 1).double()
        where = x.abs().argmax()
        scale = _rounded(self.logits_of(x * TINY).flatten()[where] / (x * TINY).flatten()[where])
        huge = self.logits_of(x * HUGE)
        softcap = None if _near(huge, x * HUGE * scale) else _rounded(huge.abs().max())
        for size in SIZES:
            expected = x * size * scale
            if softcap is not None:
                expected = softcap * torch.tanh(expected / softcap)
            if not scale > 0 or not _near(self.logits_of(x * size), expected):
                raise NotAnOp("its logits are not those of its head, scaled or capped")
        return scale, softcap

    def logits_of(self, head_output: Tensor) -> Tensor:
        """The logits of the loss where the head returns `head_output`."""
        logits = self.plain(torch.float64, {}, head_output).logits
        if logits.shape != head_output.shape:
            raise NotAnOp("its loss is not that of all the logits of its head")
        return logits.double()

    def ways_to_ask(self) -> Iterator[dict[str, Any]]:
        yield {}
        ways: list[dict[str, Any]] = [
            {"num_items_in_batch": torch.tensor(5)},
            {"num_items_in_batch": 3},
            {"shift_labels": self.other_labels},
            {"ignore_index": int(self.labels[0, 1]), "labels": self.labels.clamp(min=0)},
        ]
        if "attention_mask" in self.parameters:
            ways.append({"attention_mask": torch.arange(LENGTH).expand(BATCH, -1).ne(0).long()})
        yield from (arguments for arguments in ways if self.takes(next(iter(arguments))))

    def plain(
        self, dtype: torch.dtype, arguments: dict[str, Any], head_output: Tensor | None = None
    ) -> _Outcome:
        """The model's own computation."""
        model, inputs = self.stand_in(dtype)
        head = _RecordingHead(model, self.path, head_output)
        view = view_of(model, self.path, head, self.view)
        try:
            output = self.forward(view, **self.arguments(arguments))
        except Exception as error:
            raise NotAnOp(
                f"its forward fails on the CPU with a stub for the body ({first_line(error)})"
            ) from None
        if head.calls != 1 or len(head.logits) != 1:
            raise NotAnOp(
                f"for labels its forward calls its head {head.calls} times, and its loss_function"
                f" {len(head.logits)} times"
            )
        if not any(value is head.logits[0] for value in _values(output)):
            raise NotAnOp("the logits of its loss are not those that it returns")
        return _Outcome(drop(output, head.logits[0]), inputs, head.logits[0])

    def fused(self, loss: CausalLoss, arguments: dict[str, Any]) -> _Outcome:
        model, inputs = self.stand_in(torch.float32)
        arguments = self.arguments(arguments)
        try:
            head = child_of(model, loss.head)
            output = without_logits(self.forward, self.view, model, head, loss, (), arguments)
        except Exception as error:
            raise NotAnOp(
                f"its forward needs the logits for more than the loss ({first_line(error)})"
            ) from None
        return _Outcome(output, inputs)

    def compare(self, loss: CausalLoss, arguments: dict[str, Any]) -> None:
        with torch.enable_grad():
            plain = self.plain(torch.float32, arguments)
            fused = self.fused(loss, arguments)
            if not _same(plain.beside_the_loss(), fused.beside_the_loss()):
                raise NotAnOp("what its forward returns beside the loss depends on the logits")
            given = f" with {next(iter(arguments))}" if arguments else ""
            same = fused.loss.shape == plain.loss.shape and _near(fused.loss, plain.loss)
            if not same:
                raise NotAnOp(f"its loss{given} is not the cross-entropy of shifted labels")
            for gradient, expected in zip(fused.gradients(), plain.gradients(), strict=True):
                if not _near(gradient, expected, GRADIENT_BOUND):
                    raise NotAnOp(f"its loss{given} has another gradient")

    def arguments(self, given: dict[str, Any]) -> dict[str, Any]:
        arguments = {"input_ids": self.ids, "labels": self.labels, **given}
        if "output_router_logits" in self.parameters:
            # The stub has no routers. Their loss is added by the model's own code, fused or not.
            arguments["output_router_logits"] = False
        return arguments

    def stand_in(self, dtype: torch.dtype) -> tuple[nn.Module, list[Tensor]]:
        """The model with stubs for children, and what the gradient of its loss is taken for."""
        hidden = uniform((BATCH, LENGTH, HIDDEN), 2).to(dtype).requires_grad_()
        has_bias = self.head.bias is not None
        head = nn.Linear(HIDDEN, self.vocabulary, has_bias, dtype=dtype)
        with torch.no_grad():
            for seed, parameter in enumerate(head.parameters(), start=3):
                parameter.copy_(4 * uniform(parameter.shape, seed))
        model = _stand_in(self.model, self.path.split("."), hidden, head)
        return model, [hidden, *head.parameters()]


def _stand_in(module: nn.Module, path: list[str], hidden: Tensor, head: nn.Module) -> nn.Module:
    """A module in training, with stubs for children but for what leads to its head."""
    if not path:
        return head
    copied: nn.Module = object.__new__(type(module))
    vars(copied).update(vars(module))
    copied.training = True
    children: dict[str, nn.Module | None] = {}
    for name, child in module._modules.items():
        children[name] = None if child is None else _Body(child, hidden)
    children[path[0]] = _stand_in(getattr(module, path[0]), path[1:], hidden, head)
    vars(copied)["_modules"] = children
    return copied


@dataclass
class _Outcome:
    """What a forward returned, without logits."""

    output: Any
    inputs: list[Tensor]
    logits: Any = None

    @property
    def loss(self) -> Tensor:
        is_tuple = isinstance(self.output, tuple)
        loss = self.output[0] if is_tuple else self.output.get("loss")
        if not isinstance(loss, Tensor):
            raise NotAnOp("for labels its forward returns no loss")
        return loss

    def beside_the_loss(self) -> list[Any]:
        return pytree.tree_leaves(
            [value for value in _values(self.output) if value is not self.loss]
        )

    def gradients(self) -> list[Tensor]:
        if not self.loss.requires_grad:
            raise NotAnOp("its loss has no gradient")
        gradients = torch.autograd.grad(self.loss, self.inputs, allow_unused=True)
        pairs = zip(gradients, self.inputs, strict=True)
        return [torch.zeros_like(x) if dx is None else dx for dx, x in pairs]


class _Body(nn.Module):
    """A child, and what it holds: given hidden states it returns them, and else it makes them."""

    def __init__(self, child: nn.Module, hidden: Tensor) -> None:
        super().__init__()
        vars(self).update(child=child, hidden=hidden)

    def __getattr__(self, name: str) -> Any:
        value = getattr(vars(self)["child"], name)
        return _Body(value, self.hidden) if isinstance(value, nn.Module) else value

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], Tensor) and args[0].is_floating_point():
            return args[0]
        return _BodyOutput(last_hidden_state=self.hidden)


class _BodyOutput(OrderedDict[str, Any]):
    """As a ModelOutput of transformers: what is absent is None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.get(name)

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else tuple(self.values())[key]


class _RecordingHead:
    """The head and the loss as they are, or a head that returns what it was given to return."""

    def __init__(self, model: nn.Module, path: str, output: Tensor | None) -> None:
        self.head = child_of(model, path)
        self.original_loss: Any = model.loss_function
        self.output = output
        self.calls = 0
        self.logits: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.head, name)

    def __call__(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        return self.head(hidden) if self.output is None else self.output.clone()

    def loss_function(self, logits: Any, *args: Any, **kwargs: Any) -> Any:
        self.logits.append(logits)
        return self.original_loss(logits, *args, **kwargs)


def _values(output: Any) -> tuple[Any, ...]:
    if type(output) is tuple:
        return output
    if isinstance(output, dict):
        return tuple(output.values())
    raise NotAnOp(f"its forward returns a {type(output).__name__}, neither a tuple nor a dict")


def _same(one: list[Any], other: list[Any]) -> bool:
    def equal(a: Any, b: Any) -> bool:
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            return a.shape == b.shape and torch.equal(a, b)
        return type(a) is type(b) and bool(a == b)

    return len(one) == len(other) and all(map(equal, one, other))


def _near(x: Tensor, y: Tensor, bound: float = BOUND) -> bool:
    return bool((x - y).abs().max() <= bound * y.abs().max())


def _rounded(x: Tensor) -> float:
    """Without the last digits, which the measurement brings in."""
    return float(f"{x.item():.12g}")
