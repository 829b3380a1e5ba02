"""What the rewrites, or `fuse`, gain: bytes that no backward needs, and a step's time and peak."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ..device import MIB, Effort, MeasuredDevice, spread
from ..torch_private import FakeTensor
from .default_rewrites import chosen
from .engine.failure import first_line
from .state import state_kept
from .verify import as_unchanged, loss_of, modules_of

EFFORT = Effort(rounds=30, seconds=3.0)


@dataclass(frozen=True)
class Step:
    """A training step as it was measured: the forward, and the gradients of all parameters.

    Attributes:
        name: how the step runs or, of a rewrite, its name.
        milliseconds: the median.
        spread: the 20th and the 80th percentile, in milliseconds.
        peak_bytes: the most memory that the step holds above what was there before.
        compile_seconds: how much longer the first call took than the median; 0 of an eager step.
        error: why the step cannot be run, or "".
    """

    name: str
    milliseconds: float = 0.0
    spread: tuple[float, float] = (0.0, 0.0)
    peak_bytes: int = 0
    compile_seconds: float = 0.0
    error: str = ""

    def __str__(self) -> str:
        if self.error:
            return f"  {self.name:32} fails: {self.error}"
        (low, high), seconds = self.spread, self.compile_seconds
        time = f"{self.milliseconds:9.2f} ms ({low:.2f} to {high:.2f})"
        compiled = f", compiled in {seconds:.1f} s" if seconds else ""
        return f"  {self.name:32}{time}, peak {self.peak_bytes / MIB:,.1f} MiB{compiled}"


@dataclass(frozen=True)
class Gain:
    """The measurement of `explain(measure=True)`.

    Attributes:
        device: the name of the device.
        steps: the step unchanged, and with the ops, the latter last.
        rewrites: for each rewrite whose absence changes more than noise, the step without it.
    """

    device: str
    steps: tuple[Step, ...]
    rewrites: tuple[Step, ...] = ()

    def __str__(self) -> str:
        lines = [f"a step on {self.device}: forward and gradients, median (20% to 80%)"]
        return "\n".join([*lines, *map(str, (*self.steps, *self.rewrites))])


def measured(model: Any, args: Sequence[Any], kwargs: dict[str, Any], used: Iterable[str]) -> Gain:
    """Measure the steps of a model on a batch; `used` are the rewrites that are made of it."""
    run = _Steps(model, args, kwargs)
    with as_unchanged(modules_of(model)) as changed:
        name = "unfused, " if changed else ""
        before = (run.eager(f"{name}eager"), run.compiled(f"{name}torch.compile"))
    if changed:
        after = (run.eager("fused, eager"), run.compiled("fused, torch.compile"))
        return Gain(run.device.name, before + after)
    defaults = chosen(None, True, "explain")
    last = run.compiled("backend='liger'", backend="liger")
    found = [name for name in defaults if name in set(used)]
    alone = []
    for name in found if len(found) > 1 else ():
        options = {"rewrites": [other for other in defaults if other != name]}
        alone.append(run.compiled(f"  without {name}", backend="liger", options=options))
    matter = (step for step in alone if _differs(step, last))
    return Gain(run.device.name, (*before, last), tuple(matter))


def _differs(one: Step, other: Step) -> bool:
    """Whether two steps differ by more than noise: outside of each other's spread, or by a
    hundredth of the memory."""
    apart = one.spread[0] > other.spread[1] or other.spread[0] > one.spread[1]
    memory = abs(one.peak_bytes - other.peak_bytes) > max(one.peak_bytes, other.peak_bytes) / 100
    return bool(one.error) or apart or memory


class _Steps:
    """Steps of one model on one batch. They change no `.grad`, and no buffer."""

    def __init__(self, model: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.model, self.args, self.kwargs = model, args, kwargs
        parameters = [p for one in modules_of(model) for p in one.parameters()]
        leaves = [*parameters, *pytree.tree_leaves((args, kwargs))]
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        self.leaves = [x for x in tensors if x.requires_grad]
        self.device = MeasuredDevice(tensors[0].device.type if tensors else "cpu")

    def eager(self, name: str) -> Step:
        return replace(self._step(name, lambda: self.model), compile_seconds=0.0)

    def compiled(self, name: str, **options: Any) -> Step:
        return self._step(name, lambda: torch.compile(self.model, **options))

    def _step(self, name: str, make: Callable[[], Callable[..., Any]]) -> Step:
        torch.compiler.reset()
        # A cache would hide the time of the compilation.
        uncached = torch.compiler.config.patch(force_disable_caches=True)  # type: ignore[attr-defined]
        try:
            with state_kept(self.model), torch.enable_grad(), uncached:
                return self._measured(name, make())
        except Exception as error:
            return Step(name, error=first_line(error))

    def _measured(self, name: str, function: Callable[..., Any]) -> Step:
        def call() -> None:
            loss = loss_of(function(*self.args, **self.kwargs))
            torch.autograd.grad(loss, self.leaves, allow_unused=True)

        (first,) = self.device.times(call, Effort(rounds=1))
        call()
        peak = self.device.peak_bytes(call)
        # Each step begins on an idle device, so that none hides the host's time of another.
        times = spread(self.device.times(call, EFFORT, before=self.device.synchronize))
        compiling = max(first - times.p50, 0.0) / 1e3
        return Step(name, times.p50, (times.p20, times.p80), peak, compiling)


def saved_bytes(module: fx.GraphModule) -> int | None:
    """The bytes that eager autograd saves for the backward of a graph, beside the graph's inputs;
    None if the graph does not run on tensors without data, or a size is a symbol."""
    inputs = [n.meta.get("example_value") for n in module.graph.nodes if n.op == "placeholder"]
    tensors = [x for x in inputs if isinstance(x, FakeTensor)]
    own = {x.untyped_storage()._cdata for x in tensors}
    # By the address of the storage, which is kept, so that no other takes it.
    saved: dict[int, Tensor] = {}

    def pack(x: Tensor) -> Tensor:
        saved.setdefault(x.untyped_storage()._cdata, x)
        return x

    try:
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)
        with torch.enable_grad(), tensors[0].fake_mode, hooks:
            module(*inputs)
        sizes = [x.untyped_storage().nbytes() for key, x in saved.items() if key not in own]
    except Exception:
        return None
    return sum(sizes) if all(isinstance(size, int) for size in sizes) else None
