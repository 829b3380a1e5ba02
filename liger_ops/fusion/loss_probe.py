"""Find what a causal language model computes from its hidden states by running its forward.

A stand-in for the model runs on the CPU: it has the model's own forward and attributes, and its
children are stubs. The body returns hidden states of a few columns, and the head is a small linear
layer with the model's vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from . import loss_written
from .loss_head import child_of, head_of
from .loss_lora import LoraHead
from .loss_output import drop
from .loss_stand_in import RecordingHead, stand_in
from .loss_value import CausalLoss
from .loss_view import view_class, view_of, without_logits
from .probing import DEVICE, NotAnOp, dtype_name, first_line, undisturbed, uniform
from .sharding import shape_of

BATCH, LENGTH, HIDDEN = 2, 4, 4

# Two summation orders over a vocabulary in float32 differ by less. Measured at 128256 classes: the
# losses by 1e-7, the gradients of hidden states by 1.2e-5; either is 1e-5 away from float64.
BOUND = 1e-5
GRADIENT_BOUND = 2e-4

# Magnitudes of logits: the tiny ones show the scale, the huge ones the cap.
TINY, HUGE = 2.0**-20, 2.0**30
SIZES = (TINY, 1.0, 30.0, 400.0)


def probe(model: nn.Module, path: str) -> CausalLoss:
    """Find the cross-entropy that a causal language model computes.

    First its logits are measured as a function of the head's output: the scale and the cap are
    read off, and checked on logits of all magnitudes. Then the loss, its gradients, and everything
    else that the forward returns are compared between the model and the model with fused head and
    loss, for every way to ask for a loss: with labels of which one is ignored, and with
    num_items_in_batch, shift_labels, attention_mask and ignore_index.

    The model and the random number generators do not change, and only the CPU is used.

    Args:
        model: a model with `loss_function`, on any device, including meta.
        path: the path to its head, a torch.nn.Linear, through modules whose forward is called.

    Raises:
        NotAnOp: the model computes another loss, or uses its logits for more; the text says which.
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
        # The loss does not depend on the adapters.
        self.head = head.base if isinstance(head, LoraHead) else head
        self.vocabulary = shape_of(self.head.weight)[0]
        self.forward: Callable[..., Any] = type(model).forward
        self.parameters = inspect.signature(self.forward).parameters
        self.view = view_class(type(model))
        self.written = loss_written.is_called_by(self.forward)
        generator = torch.Generator(DEVICE).manual_seed(0)
        self.ids, self.labels, self.other_labels = torch.randint(
            self.vocabulary, (3, BATCH, LENGTH), generator=generator, device=DEVICE
        )
        self.labels[0, 2] = -100

    def run(self) -> CausalLoss:
        if "skip_logits" in self.parameters:
            raise NotAnOp("its forward has a skip_logits of its own")
        if self.written:
            return self.run_written()
        loss_function: Any = getattr(self.model, "loss_function", None)
        if not inspect.isfunction(loss_function):
            raise NotAnOp(f"its loss_function is a {type(loss_function).__name__}, not a function")
        scale, softcap = self.logit_options()
        loss = self.labels_of(CausalLoss(self.path, loss_function, scale, softcap))
        for arguments in self.ways_to_ask():
            self.compare(loss, arguments)
        dtype = self.plain(torch.bfloat16, {}).loss.dtype
        if dtype is not torch.float32:
            raise NotAnOp(f"its loss is {dtype_name(dtype)} where the model is bfloat16")
        return loss

    def run_written(self) -> CausalLoss:
        """The loss of a forward that calls CrossEntropyLoss itself, without scale and cap."""
        output_class = type(self.output_of(torch.float32, {})[0])
        loss = CausalLoss(self.path, nn.CrossEntropyLoss, 1.0, None, False, False, output_class)
        try:
            self.fused(loss, {})
        except NotAnOp:
            loss = replace(loss, adds_to_logits=True)
        for arguments in self.ways_to_ask():
            self.compare(loss, arguments)
        plain, fused = self.plain(torch.bfloat16, {}), self.fused(loss, {}, torch.bfloat16)
        if plain.loss.dtype is not fused.loss.dtype:
            raise NotAnOp(f"its loss is {dtype_name(plain.loss.dtype)} where the model is bfloat16")
        return loss

    def labels_of(self, loss: CausalLoss) -> CausalLoss:
        """Determine whether the loss shifts its labels, and whether it takes shift_labels."""
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
        """Whether the forward has an argument of that name."""
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
        """The logits that reach the loss if the head returns `head_output`."""
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
        """Run the model's own computation."""
        output, inputs, head = self.output_of(dtype, arguments, head_output)
        if self.written:
            return _Outcome(self.without_its_logits(output, head), inputs)
        if head.calls != 1 or len(head.logits) != 1:
            raise NotAnOp(
                f"for labels its forward calls its head {head.calls} times, and its loss_function"
                f" {len(head.logits)} times"
            )
        if not any(value is head.logits[0] for value in _values(output)):
            raise NotAnOp("the logits of its loss are not those that it returns")
        return _Outcome(drop(output, head.logits[0]), inputs, head.logits[0])

    def without_its_logits(self, output: Any, head: RecordingHead) -> Any:
        """The output, without logits, of a forward that computes the loss itself."""
        if head.calls != 1 or head.logits:
            raise NotAnOp(
                f"for labels its forward calls its head {head.calls} times, and its loss_function"
                f" {len(head.logits)} times"
            )
        shape = (BATCH, LENGTH, self.vocabulary)
        logits = [x for x in _values(output) if isinstance(x, Tensor) and x.shape == shape]
        if len(logits) != 1:
            raise NotAnOp("the logits of its loss are not those that it returns")
        return drop(output, logits[0])

    def output_of(
        self, dtype: torch.dtype, arguments: dict[str, Any], head_output: Tensor | None = None
    ) -> tuple[Any, list[Tensor], RecordingHead]:
        model, inputs = self.stand_in(dtype)
        head = RecordingHead(model, self.path, head_output)
        view = view_of(model, self.path, head, self.view)
        try:
            return self.forward(view, **self.arguments(arguments)), inputs, head
        except Exception as error:
            raise NotAnOp(
                f"its forward fails on the CPU with a stub for the body ({first_line(error)})"
            ) from None

    def fused(
        self, loss: CausalLoss, arguments: dict[str, Any], dtype: torch.dtype = torch.float32
    ) -> _Outcome:
        model, inputs = self.stand_in(dtype)
        arguments = self.arguments(arguments)
        try:
            head = child_of(model, loss.head)
            forward = loss_written.calling(self.forward) if loss.written else self.forward
            output = without_logits(forward, self.view, model, head, loss, (), arguments)
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
            # The stub has no routers. The model's own code adds their loss, fused or not.
            arguments["output_router_logits"] = False
        return arguments

    def stand_in(self, dtype: torch.dtype) -> tuple[nn.Module, list[Tensor]]:
        """The model with stubs for children, and the tensors to take the loss's gradients for."""
        hidden = uniform((BATCH, LENGTH, HIDDEN), 2).to(dtype).requires_grad_()
        has_bias = self.head.bias is not None
        head = nn.Linear(HIDDEN, self.vocabulary, has_bias, dtype=dtype)
        with torch.no_grad():
            for seed, parameter in enumerate(head.parameters(), start=3):
                parameter.copy_(4 * uniform(parameter.shape, seed))
        model = stand_in(self.model, self.path.split("."), hidden, head, self.written)
        return model, [hidden, *head.parameters()]


@dataclass
class _Outcome:
    """The output of a forward, without logits."""

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
    """Round off the last digits, which are measurement error."""
    return float(f"{x.item():.12g}")
