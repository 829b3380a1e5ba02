"""The Dynamo backend `liger`: the rewrites, then Inductor or another backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from . import rewrite
from .chosen import checked_strict, chosen
from .inductor import declare_ops
from .unfused_loss import warn

Compiled = Callable[..., Any]
InnerBackend = str | Callable[..., Compiled]


def liger(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Compiled:
    """Compile with the ops of this package wherever the graph computes what they compute.

        torch.compile(model, backend="liger")

    Before autograd, where the graph still has the operations that the code was written with, every
    part that computes what an op does is replaced by the op; the rest goes to Inductor, or to
    another backend. `liger_ops.explain` says what is replaced, and what is not and why;
    `liger_ops.enable` does the same to every compilation by Inductor.

    `mode`, `dynamic` and `fullgraph` of `torch.compile` mean what they do without this backend. So
    do its `options`, but for four of this backend's own:

    * "mode": the mode, for those who need both: `torch.compile` takes either it or options.
    * "inner_backend": what compiles the graph afterwards, by its name or itself; "inductor".
    * "rewrites": the names of the rewrites to make, of `liger_ops.lowering.passes.REWRITES`, or
      "all". By default those that pay: before Inductor, all but `chosen.KEPT_BY_INDUCTOR`, and all
      before another backend.
    * "strict": whether an exception in a rewrite is raised. By default the graph is then compiled
      as it came, without any rewrite, with a warning; LIGER_OPS_STRICT=1 in the environment makes
      True the default.

    A rewrite is made only where it is exact: the same equation in the same casting mode, with the
    same eps and offset, of the same result's dtype, sizes, device and strides, or of strides that
    nothing can tell from them; no value on the way used elsewhere, none written in place in
    between, nothing random. What is rounded on the way, within a dtype, may be rounded less often,
    as by Inductor: rope, the gated activations and the scale and cap of logits compute in float32
    and round once. A rewrite erases the nodes that it replaces and no other. The code of
    autograd functions, and what torch.func transforms, is left alone.

    Raises:
        TypeError: options["inner_backend"] is neither a name nor a function, options["rewrites"] no
            name or list of names, or options["strict"] not a bool.
        ValueError: a rewrite of options["rewrites"] has no such name.
    """
    rest = dict(options or {})
    mode = rest.pop("mode", mode)
    inner = _checked_inner(rest.pop("inner_backend", "inductor"))
    names = chosen(
        rest.pop("rewrites", None), inner == "inductor", "backend liger: options['rewrites']"
    )
    strict = checked_strict(rest.pop("strict", None), "backend liger: options['strict']")
    warn(rewrite(module, names, strict=strict).findings)
    if inner == "inductor":
        declare_ops()
        inductor = torch._TorchCompileInductorWrapper(mode, rest, dynamic=None)
        return inductor(module, example_inputs)
    wrapper = torch._TorchCompileWrapper(inner, mode, rest, dynamic=None)
    return wrapper(module, example_inputs)


def _reset() -> None:
    from torch._inductor.cudagraph_trees import reset_cudagraph_trees

    reset_cudagraph_trees()


# torch.compiler.reset calls this, as Inductor's own.
liger.reset = _reset  # type: ignore[attr-defined]


def _checked_inner(inner: Any) -> InnerBackend:
    if not isinstance(inner, str) and not callable(inner):
        raise TypeError(
            "backend liger: options['inner_backend'] must be a backend's name or a function, got"
            f" {type(inner).__name__}"
        )
    return inner
