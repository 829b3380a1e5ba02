"""Measure what the rewrites or `fuse` gain: saved bytes, and a training step's time and memory."""

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
from .engine.report import first_line
from .verify import as_unchanged, loss_of, modules_of, state_kept

EFFORT = Effort(rounds=30, seconds=3.0)


@dataclass(frozen=True)
class MeasuredStep:
    """The measurement of a training step: the forward, and the gradients of all parameters.

    Attributes:
        name: how the step runs, such as "eager" or "  without rope".
        milliseconds: the median.
        spread: the 20th and the 80th percentile, in milliseconds.
        peak_bytes: the step's largest use of memory, above the use before it.
        compile_seconds: how much longer the first call took than the median; 0 for an eager step.
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
        steps: the steps without the ops, then the steps with them.
        rewrites: for each rewrite whose absence changes more than noise, the step without it.
    """

    device: str
    steps: tuple[MeasuredStep, ...]
    rewrites: tuple[MeasuredStep, ...] = ()

    def __str__(self) -> str:
        lines = [f"a step on {self.device}: forward and gradients, median (20% to 80%)"]
        return "\n".join([*lines, *map(str, (*self.steps, *self.rewrites))])


def measured(model: Any, args: Sequence[Any], kwargs: dict[str, Any], used: Iterable[str]) -> Gain:
    """Measure training steps of a model on a batch; `used` are the rewrites that found their op."""
    run = _Steps(model, args, kwargs)
    with as_unchanged(modules_of(model)) as changed:
        name = "unfused, " if changed else ""
        before = (run.eager(f"{name}eager"), run.compiled(f"{name}torch.compile"))
    if changed:
        after = (run.eager("fused, eager"), run.compiled("fused, torch.compile"))
        return Gain(run.device.name, before + after)
    defaults = chosen(None, True, "explain")
    last = run.compiled("backend='liger'", backend="liger")
    active = [name for name in defaults if name in set(used)]
    without = []
    # Without its only rewrite a model runs as by torch.compile, which has been measured.
    for name in active if len(active) > 1 else ():
        options = {"rewrites": [other for other in defaults if other != name]}
        without.append(run.compiled(f"  without {name}", backend="liger", options=options))
    relevant = (step for step in without if _differs(step, last))
    return Gain(run.device.name, (*before, last), tuple(relevant))


def _differs(a: MeasuredStep, b: MeasuredStep) -> bool:
    """Return whether two steps differ by more than noise.

    Their spreads are disjoint, or their peaks differ by more than a hundredth.
    """
    is_apart = a.spread[0] > b.spread[1] or b.spread[0] > a.spread[1]
    differ_in_memory = abs(a.peak_bytes - b.peak_bytes) > max(a.peak_bytes, b.peak_bytes) / 100
    return bool(a.error) or is_apart or differ_in_memory


class _Steps:
    """Steps of one model on one batch. They change no `.grad`, and no buffer."""

    def __init__(self, model: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.model, self.args, self.kwargs = model, args, kwargs
        parameters = [p for module in modules_of(model) for p in module.parameters()]
        leaves = [*parameters, *pytree.tree_leaves((args, kwargs))]
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        self.leaves = [x for x in tensors if x.requires_grad]
        self.device = MeasuredDevice(tensors[0].device.type if tensors else "cpu")

    def eager(self, name: str) -> MeasuredStep:
        return replace(self._step(name, lambda: self.model), compile_seconds=0.0)

    def compiled(self, name: str, **options: Any) -> MeasuredStep:
        return self._step(name, lambda: torch.compile(self.model, **options))

    def _step(self, name: str, make: Callable[[], Callable[..., Any]]) -> MeasuredStep:
        torch.compiler.reset()
        # A cache would hide the time of the compilation.
        uncached = torch.compiler.config.patch(force_disable_caches=True)  # type: ignore[attr-defined]
        try:
            with state_kept(self.model), torch.enable_grad(), uncached:
                return self._measured(name, make())
        except Exception as error:
            return MeasuredStep(name, error=first_line(error))

    def _measured(self, name: str, function: Callable[..., Any]) -> MeasuredStep:
        def call() -> None:
            loss = loss_of(function(*self.args, **self.kwargs))
            torch.autograd.grad(loss, self.leaves, allow_unused=True)

        (first,) = self.device.times(call, Effort(rounds=1))
        call()
        peak = self.device.peak_bytes(call)
        # Each step begins on an idle device, so that none hides the host's time of another.
        times = spread(self.device.times(call, EFFORT, before=self.device.synchronize))
        compiling = max(first - times.p50, 0.0) / 1e3
        return MeasuredStep(name, times.p50, (times.p20, times.p80), peak, compiling)


def saved_bytes(module: fx.GraphModule) -> int | None:
    """Return how many bytes eager autograd saves for the backward of a graph.

    The graph's inputs are not counted. None if the graph does not run on fake tensors, or a size is
    symbolic.
    """
    inputs = [n.meta.get("example_value") for n in module.graph.nodes if n.op == "placeholder"]
    tensors = [x for x in inputs if isinstance(x, FakeTensor)]
    of_inputs = {x.untyped_storage()._cdata for x in tensors}
    # Address of a storage -> a tensor in it, which keeps the storage, so that the address is not
    # used again.
    saved: dict[int, Tensor] = {}

    def pack(x: Tensor) -> Tensor:
        saved.setdefault(x.untyped_storage()._cdata, x)
        return x

    try:
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)
        with torch.enable_grad(), tensors[0].fake_mode, hooks:
            module(*inputs)
        sizes = [x.untyped_storage().nbytes() for key, x in saved.items() if key not in of_inputs]
    except Exception:
        return None
    return sum(sizes) if all(isinstance(size, int) for size in sizes) else None
