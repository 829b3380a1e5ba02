"""Run a language model's forward once, to see what it does to its logits.

A stand-in for the model runs on the CPU: its own code, with stubs for the body, and deferred
logits. Whether they are deferred or computed in a step is decided in that step; a dry run only says
what `fuse` is to report, and which models to leave because each step would compute all logits.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..asked import watched
from ..layers.rebinding import chain_to, opaque, rebound
from ..probing import DEVICE, NotAnOp, first_line, undisturbed
from ..sharding import shape_of
from . import place
from .calls import DeferringHead
from .deferral import Deferral
from .deferred import DeferredLogits
from .form import Form
from .head import head_of, parameter_of
from .lora import LoraHead
from .options import CHECKS, LossOptions
from .output import settled
from .stand_in import Names, stand_in

BATCH = 2
LENGTHS = (4, 9)
MADE = "CrossEntropyLoss"


@dataclass(frozen=True)
class LossFacts:
    """How a model's forward is called for a loss.

    head: the path to its head.
    own_arguments: the options that its loss_function has arguments for, which are the model's.
    takes_shift_labels: whether shift_labels are the labels of its loss.
    output_class: the class of its output.
    makes_loss: whether it makes a torch.nn.CrossEntropyLoss in the forward, which Dynamo calls in a
        way of its own, that takes only tensors.
    rebinds: whether that is the name CrossEntropyLoss among the globals of its forward.
    """

    head: str
    own_arguments: tuple[str, ...] = ()
    takes_shift_labels: bool = False
    output_class: type | None = None
    makes_loss: bool = False
    rebinds: bool = False


class TracedLoss:
    """Like torch.nn.CrossEntropyLoss, for which Dynamo has a trace of its own that takes only
    tensors: torch.compile alone runs a copy of a forward that makes one of these in each call."""

    def __init__(
        self, weight: Tensor | None = None, size_average: Any = None, ignore_index: int = -100,
        reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
    ) -> None:  # fmt: skip
        self.arguments = (weight, size_average, ignore_index, reduce, reduction, label_smoothing)

    def __call__(self, logits: Any, target: Any) -> Tensor:
        return F.cross_entropy(logits, target, *self.arguments)


def with_traced_loss(forward: Any) -> Any:
    """A copy of a forward that makes TracedLoss for CrossEntropyLoss, or None if its code does not
    name that class."""
    chain = chain_to(forward, MADE)
    if not chain or opaque(chain) or chain[-1].__globals__.get(MADE) is not nn.CrossEntropyLoss:
        return None
    return rebound(forward, {MADE: lambda value: TracedLoss})


def dry_run(model: nn.Module, path: str) -> tuple[LossFacts, dict[str, Any]]:
    """What is known of a model's loss, and the op's options in it.

    The model and the random number generators do not change.

    Args:
        model: a language model, on any device, including meta.
        path: the path to its head, a torch.nn.Linear, through modules whose forward is called.

    Raises:
        NotAnOp: a step would compute all logits; the text says why.
    """
    with undisturbed(), torch.enable_grad():
        return _DryRun(model, path).run()


class _DryHead(DeferringHead):
    """A head that keeps what reaches its loss."""

    def __init__(self, layer: nn.Linear, names: Names, modules: list[Any]) -> None:
        super().__init__(layer, [layer], LossOptions(), self._left)
        self.names = names
        self.own_modules = modules
        self.forms: list[Form] = []
        self.targets: list[Tensor] = []
        self.makes_loss = False

    def _left(self, reason: str, operands: tuple[Any, ...]) -> None:
        found = [self.names[id(x)] for x in operands if id(x) in self.names]
        raise NotAnOp(f"{reason}, with its {found[0]}" if found else reason)

    def loss(self, logits: Deferral, target: Tensor, options: dict[str, Any]) -> Tensor:
        if target.shape != logits.rows:
            raise ValueError("there are not as many labels as logits")
        self.losses += 1
        self.forms.append(logits.form)
        self.targets.append(target)
        frame: Any = sys._getframe()
        while frame is not None:
            caller = frame.f_locals.get("self")
            if type(caller) is nn.CrossEntropyLoss:
                self.makes_loss |= not any(caller is module for module in self.own_modules)
            frame = frame.f_back
        rows = target.shape if options["reduction"] == "none" else ()
        return (logits.hidden.sum() * 0).to(logits.dtype()).expand(rows)


class _DryRun:
    def __init__(self, model: nn.Module, path: str) -> None:
        self.model = model
        self.path = path
        head = head_of(model, path, sharded=True)
        if isinstance(head, str):
            raise NotAnOp(head)
        # The loss does not depend on the adapters.
        self.head = head.base if isinstance(head, LoraHead) else head
        self.forward: Callable[..., Any] = type(model).forward
        self.parameters = inspect.signature(self.forward).parameters

    def run(self) -> tuple[LossFacts, dict[str, Any]]:
        if "skip_logits" in self.parameters:
            raise NotAnOp("its forward has a skip_logits of its own")
        output, first = self.once(self.forward, self.arguments(LENGTHS[0]))
        if not first.losses:
            raise NotAnOp("its forward computes no cross_entropy of its head's output")
        if not isinstance(output, (tuple, dict)):
            raise NotAnOp(
                f"its forward returns a {type(output).__name__}, neither a tuple nor a dict"
            )
        left = settled(output, skips=True)
        leaves = pytree.tree_leaves(list(left.values() if isinstance(left, dict) else left))
        if any(isinstance(leaf, DeferredLogits) for leaf in leaves):
            raise NotAnOp("its forward returns its logits within another value")
        forms, takes_shift_labels = list(first.forms), False
        for arguments in self.other_arguments():
            try:
                _, other = self.once(self.forward, arguments)
            except _Fails:
                # A step with these arguments may fail in the model's own code.
                continue
            except NotAnOp as reason:
                given = set(arguments) - {"input_ids", "labels", "output_router_logits"}
                raise NotAnOp(
                    f"with {', '.join(given)}, {reason}" if given else str(reason)
                ) from None
            forms += other.forms
            shifted = arguments.get("shift_labels")
            if shifted is not None and other.targets:
                takes_shift_labels = torch.equal(other.targets[0], shifted.reshape(-1))
        facts = LossFacts(
            self.path,
            self.own_arguments(),
            takes_shift_labels,
            type(output),
            first.makes_loss,
            first.makes_loss and self.rebinds(),
        )
        scales, caps = ([getattr(form, n) for form in forms] for n in ("logit_scale", "softcap"))
        return facts, {"logit_scale": _only(scales), "softcap": _only(caps)}

    def rebinds(self) -> bool:
        forward = with_traced_loss(self.forward)
        if forward is None:
            return False
        return not self.once(forward, self.arguments(LENGTHS[0]))[1].makes_loss

    def own_arguments(self) -> tuple[str, ...]:
        function = getattr(self.model, "loss_function", None)
        if not callable(function):
            return ()
        return tuple(name for name in inspect.signature(function).parameters if name in CHECKS)

    def other_arguments(self) -> Iterator[dict[str, Any]]:
        """The arguments of other steps than the first."""
        yield self.arguments(LENGTHS[1])
        labels = self.arguments(LENGTHS[0])["labels"]
        ways: dict[str, Any] = {
            "num_items_in_batch": 3,
            "shift_labels": labels.flip(-1),
            "attention_mask": torch.ones_like(labels),
        }
        takes_any = any(p.kind is p.VAR_KEYWORD for p in self.parameters.values())
        for name, value in ways.items():
            if takes_any and name != "attention_mask" or name in self.parameters:
                yield {**self.arguments(LENGTHS[0]), name: value}

    def arguments(self, length: int) -> dict[str, Any]:
        ids = torch.arange(BATCH * length, device=DEVICE).reshape(BATCH, length)
        ids = ids % shape_of(parameter_of(self.head, "weight"))[0]
        arguments: dict[str, Any] = {"input_ids": ids, "labels": ids.clone()}
        if "output_router_logits" in self.parameters:
            # The stub has no routers. The model's own code adds their loss, fused or not.
            arguments["output_router_logits"] = False
        return arguments

    def once(self, forward: Callable[..., Any], arguments: dict[str, Any]) -> tuple[Any, _DryHead]:
        weight = parameter_of(self.head, "weight")
        words, columns = shape_of(weight)
        zero = torch.zeros((), dtype=weight.dtype, device=DEVICE)
        hidden = zero.expand(*arguments["labels"].shape, columns).detach().requires_grad_()
        layer = nn.Linear(1, 1, self.head.bias is not None, device=DEVICE)
        layer.in_features, layer.out_features = columns, words
        layer.weight = nn.Parameter(zero.expand(words, columns))
        if layer.bias is not None:
            layer.bias = nn.Parameter(zero.expand(words))
        names: Names = {}
        head = _DryHead(layer, names, list(self.model.modules()))
        model = stand_in(self.model, self.path.split("."), hidden, layer, names)
        place.prepare(layer)
        before, place.CALLS.active = place.CALLS.active, ((layer, head),)
        own, classes_asked = set(map(id, (model, layer))), list[Any]()

        def is_stand_in(one: Any) -> bool:
            return id(one) in own or isinstance(one, DeferredLogits)

        try:
            with watched(is_stand_in, classes_asked):
                output = forward(model, **arguments)
            for one in classes_asked:
                whose = {id(model): "itself", id(layer): "its head"}.get(id(one), "its logits")
                raise NotAnOp(f"its forward asks for the class of {whose}")
            if kept := _kept_in(model):
                raise NotAnOp(f"its forward keeps its logits, in {kept}")
            return output, head
        except NotAnOp:
            raise
        except Exception as error:
            raise _Fails(
                f"its forward fails on the CPU with a stub for the body ({first_line(error)})"
            ) from None
        finally:
            place.CALLS.active = before
            head.finish()


def _kept_in(model: nn.Module) -> str | None:
    """The attribute of a model or of a child that holds deferred logits, or None."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if any(isinstance(one, DeferredLogits) for one in pytree.tree_leaves(value)):
                return f"{path}.{name}".lstrip(".")
    return None


class _Fails(NotAnOp):
    """The model's code fails in a dry run."""


def _only(values: list[Any]) -> Any:
    """The value that all have, or all values, in a text."""
    found = sorted(set(values), key=str)
    return found[0] if len(found) == 1 else " or ".join(map(str, found))
