"""Run a language model's forward once, to see what it does to its logits.

A stand-in for the model runs on the CPU: the model's own code, with stubs for the children of its
body, on deferred logits. Each training step decides for itself whether the logits stay deferred. A
dry run only finds what `fuse` is to report, and which models to leave because every step would
compute all logits.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..asked import watched
from ..layers.rebinding import chain_to, opaque, rebound
from ..lora.head import LoraHead
from ..probing import DEVICE, NotAnOp, first_line, undisturbed
from ..sharding import shape_of
from . import calls
from .calls import DeferringHead
from .deferral import Deferral, LogitsTransform
from .deferred import DeferredLogits, without_deferred
from .head import head_of, parameter_of
from .head_call import running_frames
from .options import CHECKS, ForwardLossOptions

# id of a tensor -> its name in the model.
TensorNames = dict[int, str]


def stand_in(
    module: nn.Module, path: list[str], hidden: Tensor, head: nn.Module, names: TensorNames,
    prefix: str = "",
) -> nn.Module:  # fmt: skip
    """Copy a module, in training mode and with stubs for the children that are not on `path`.

    In the copy, the module's own parameters and buffers are zeros of the same shapes on the CPU,
    which take no memory.

    Args:
        module: a language model, or a module on the path.
        path: the names of the children that lead from `module` to the head.
        hidden: the hidden states that the stubs return.
        head: the module in the place of the head.
        names: filled with the names of the model's tensors.
        prefix: the path from the model to `module`, with a dot at its end.
    """
    if not path:
        return head
    copied: nn.Module = object.__new__(type(module))
    vars(copied).update(vars(module))
    copied.training = True
    children: dict[str, nn.Module | None] = {}
    for name, child in module._modules.items():
        children[name] = None if child is None else _Body(child, prefix + name, hidden)
        if child is not None:
            names.update(
                (id(x), f"parameter {prefix}{name}.{n}") for n, x in child.named_parameters()
            )
            names.update((id(x), f"buffer {prefix}{name}.{n}") for n, x in child.named_buffers())
    inner = stand_in(getattr(module, path[0]), path[1:], hidden, head, names, f"{prefix}{path[0]}.")
    children[path[0]] = inner
    parameters = {name: _like(tensor) for name, tensor in module._parameters.items()}
    buffers = {name: _like(tensor) for name, tensor in module._buffers.items()}
    vars(copied).update(_modules=children, _buffers=buffers)
    vars(copied)["_parameters"] = {
        name: None if tensor is None else nn.Parameter(tensor, tensor.is_floating_point())
        for name, tensor in parameters.items()
    }
    for kind, own in (("parameter", copied._parameters), ("buffer", buffers)):
        names.update((id(tensor), f"{kind} {prefix}{name}") for name, tensor in own.items())
    return copied


def _like(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    return torch.zeros((), dtype=tensor.dtype, device=DEVICE).expand(tensor.shape)


class _Body(nn.Module):
    """A stub for a child: it returns the hidden states that it is given, or `hidden` if it is given
    none. Called with deferred logits, it runs the child itself."""

    def __init__(self, child: nn.Module, name: str, hidden: Tensor) -> None:
        super().__init__()
        vars(self).update(child=child, name=name, hidden=hidden)

    def __getattr__(self, name: str) -> Any:
        found = vars(self)
        value = getattr(found["child"], name)
        if isinstance(value, nn.Module):
            return _Body(value, f"{found['name']}.{name}", found["hidden"])
        return value

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, DeferredLogits) for value in (*args, *kwargs.values())):
            return self._of_logits(*args, **kwargs)
        if args and isinstance(args[0], Tensor) and args[0].is_floating_point():
            return args[0]
        return _BodyOutput(last_hidden_state=self.hidden)

    def _of_logits(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.child(*args, **kwargs)
        except NotAnOp as reason:
            what = f"its {self.name}, a {type(self.child).__name__},"
            raise NotAnOp(str(reason).replace("its forward", what, 1)) from None


class _BodyOutput(OrderedDict[str, Any]):
    """An output like a ModelOutput of transformers: an absent field is None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.get(name)

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else tuple(self.values())[key]


BATCH = 2
LENGTHS = (4, 9)
LOSS_CLASS = "CrossEntropyLoss"


@dataclass(frozen=True)
class LossFacts:
    """The facts about a model's forward that its fused forward needs.

    Attributes:
        head: the path to the head.
        own_arguments: the options that are arguments of the model's own loss_function, to which
            they are left.
        takes_shift_labels: whether shift_labels are the labels of its loss.
        output_class: the class of its output.
        makes_loss: whether it creates a torch.nn.CrossEntropyLoss in each call, for which Dynamo
            has a trace of its own that takes only tensors.
        rebinds: whether it does so by the global name CrossEntropyLoss, which a copy of the
            forward can bind to `TracedLoss`.
    """

    head: str
    own_arguments: tuple[str, ...] = ()
    takes_shift_labels: bool = False
    output_class: type | None = None
    makes_loss: bool = False
    rebinds: bool = False


class TracedLoss:
    """The same loss as torch.nn.CrossEntropyLoss, in code that Dynamo traces with deferred logits.

    Dynamo's own trace of CrossEntropyLoss takes only tensors. Under torch.compile a copy of the
    forward runs that creates a TracedLoss in its place.
    """

    def __init__(
        self, weight: Tensor | None = None, size_average: Any = None, ignore_index: int = -100,
        reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
    ) -> None:  # fmt: skip
        self.arguments = (weight, size_average, ignore_index, reduce, reduction, label_smoothing)

    def __call__(self, logits: Any, target: Any) -> Tensor:
        return F.cross_entropy(logits, target, *self.arguments)


def with_traced_loss(forward: Any) -> Any:
    """Return a copy of a forward that creates TracedLoss for CrossEntropyLoss, or None if its code
    does not name that class."""
    chain = chain_to(forward, LOSS_CLASS)
    if (
        not chain
        or opaque(chain)
        or chain[-1].__globals__.get(LOSS_CLASS) is not nn.CrossEntropyLoss
    ):
        return None
    return rebound(forward, {LOSS_CLASS: lambda value: TracedLoss})


def dry_run(model: nn.Module, path: str) -> tuple[LossFacts, dict[str, Any]]:
    """Return the facts about a model's loss, and the op's options in it.

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
    """A head that records the transforms and the targets of its losses, and computes none."""

    def __init__(self, layer: nn.Linear, names: TensorNames, modules: list[Any]) -> None:
        super().__init__(layer, [layer], ForwardLossOptions(), self._refuse)
        self.names = names
        self.own_modules = modules
        self.transforms: list[LogitsTransform] = []
        self.targets: list[Tensor] = []
        self.makes_loss = False

    def _refuse(self, reason: str, operands: tuple[Any, ...]) -> None:
        found = [self.names[id(x)] for x in operands if id(x) in self.names]
        raise NotAnOp(f"{reason}, with its {found[0]}" if found else reason)

    def loss(self, logits: Deferral, target: Tensor, options: dict[str, Any]) -> Tensor:
        if target.shape != logits.rows:
            raise ValueError("there are not as many labels as logits")
        self.losses += 1
        self.transforms.append(logits.transform)
        self.targets.append(target)
        # A CrossEntropyLoss on the stack that is no child of the model was created in this call.
        for frame in running_frames():
            caller = frame.f_locals.get("self")
            if type(caller) is nn.CrossEntropyLoss:
                self.makes_loss |= not any(caller is module for module in self.own_modules)
        rows = target.shape if options["reduction"] == "none" else ()
        return (logits.hidden.sum() * 0).to(logits.dtype()).expand(rows)


class _DryRun:
    def __init__(self, model: nn.Module, path: str) -> None:
        self.model = model
        self.path = path
        head = head_of(model, path, sharded=True)
        if isinstance(head, str):
            raise NotAnOp(head)
        # What the forward does to its logits does not depend on the head's adapters.
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
        returned = without_deferred(output, skips=True)
        leaves = pytree.tree_leaves(
            list(returned.values() if isinstance(returned, dict) else returned)
        )
        if any(isinstance(leaf, DeferredLogits) for leaf in leaves):
            raise NotAnOp("its forward returns its logits within another value")
        transforms, takes_shift_labels = list(first.transforms), False
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
            transforms += other.transforms
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
        scales, caps = (
            [getattr(transform, n) for transform in transforms] for n in ("logit_scale", "softcap")
        )
        return facts, {"logit_scale": _joined(scales), "softcap": _joined(caps)}

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
        """Yield arguments of further calls: another length, then each optional argument alone."""
        yield self.arguments(LENGTHS[1])
        labels = self.arguments(LENGTHS[0])["labels"]
        optional: dict[str, Any] = {
            "num_items_in_batch": 3,
            "shift_labels": labels.flip(-1),
            "attention_mask": torch.ones_like(labels),
        }
        takes_any = any(p.kind is p.VAR_KEYWORD for p in self.parameters.values())
        for name, value in optional.items():
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
        names: TensorNames = {}
        head = _DryHead(layer, names, list(self.model.modules()))
        model = stand_in(self.model, self.path.split("."), hidden, layer, names)
        calls.prepare(layer)
        before, calls.REPLACED.active = calls.REPLACED.active, ((layer, head),)
        stand_ins, classes_asked = set(map(id, (model, layer))), list[Any]()

        def is_stand_in(value: Any) -> bool:
            return id(value) in stand_ins or isinstance(value, DeferredLogits)

        try:
            with watched(is_stand_in, classes_asked):
                output = forward(model, **arguments)
            for value in classes_asked:
                whose = {id(model): "itself", id(layer): "its head"}.get(id(value), "its logits")
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
            calls.REPLACED.active = before
            head.finish()


def _kept_in(model: nn.Module) -> str | None:
    """Return the attribute of a model or of a child that holds deferred logits, or None."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if any(isinstance(leaf, DeferredLogits) for leaf in pytree.tree_leaves(value)):
                return f"{path}.{name}".lstrip(".")
    return None


class _Fails(NotAnOp):
    """The model's own code raised an exception in a dry run."""


def _joined(values: list[Any]) -> Any:
    """Return the only distinct value, or a text that lists all of them."""
    distinct = sorted(set(values), key=str)
    return distinct[0] if len(distinct) == 1 else " or ".join(map(str, distinct))
