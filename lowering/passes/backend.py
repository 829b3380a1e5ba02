"""The Dynamo backend `liger`: the rewrites, then Inductor or another backend."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ...compile_cache import package_hash
from . import REWRITES, rewrite, rewrite_graph
from .inductor import declare_ops

# What Inductor computes as fast in the midst of a model, where it fuses the sum of the gradients
# that arrive into a norm's backward, and an activation with its neighbours. Measured on an H200, a
# training step in bfloat16 (examples/measure_step.py): of a Llama-3.2-1B, 8 x 2048 tokens, 233 ms
# with linear_cross_entropy and rope, 238 with its norms and activations too, 238 with none of them;
# of a GPT-NeoX 174 and 176 with layer_norm, 177 and 174 without; of a UNet 60 with group_norm, 63
# without, channels last 65.5 and 65, and a quarter more memory, for the norm's result is saved.
KEPT_BY_INDUCTOR = frozenset(
    {
        "rms_norm",
        "fused_add_rms_norm",
        "layer_norm",
        "group_norm",
        "swiglu",
        "geglu",
        "clamped_swiglu",
        "relu_squared",
    }
)

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
    another backend. `liger_ops.explain` says what is replaced, and what is not and why.

    `mode`, `dynamic` and `fullgraph` of `torch.compile` mean what they do without this backend. So
    do its `options`, but for three of this backend's own:

    * "mode": the mode, for those who need both: `torch.compile` takes either it or options.
    * "inner_backend": what compiles the graph afterwards, by its name or itself; "inductor".
    * "rewrites": the names of the rewrites to make, of `liger_ops.lowering.passes.REWRITES`, or
      "all". By default those that pay: before Inductor, all but `KEPT_BY_INDUCTOR`, and all before
      another backend.

    A rewrite is made only where it is exact: the same equation in the same casting mode, with the
    same eps and offset, of the same result's dtype, sizes and strides; no value on the way used
    elsewhere, none written in place in between. What is rounded on the way, within a dtype, may be
    rounded less often, as by Inductor: rope, the gated activations and the scale and cap of logits
    compute in float32 and round once.

    Raises:
        ValueError: a rewrite of options["rewrites"] has no such name.
    """
    rest = dict(options or {})
    mode = rest.pop("mode", mode)
    inner = rest.pop("inner_backend", "inductor")
    names = chosen(rest.pop("rewrites", None), inner)
    rewrite(module, names)
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


def chosen(names: Collection[str] | None, inner: InnerBackend) -> Collection[str]:
    """The rewrites that are asked for; for None, those that pay before the backend `inner`."""
    if names is None:
        kept = KEPT_BY_INDUCTOR if inner == "inductor" else ()
        return [name for name in REWRITES if name not in kept]
    if names == "all":
        return list(REWRITES)
    names = [names] if isinstance(names, str) else list(names)
    unknown = [name for name in names if name not in REWRITES]
    if unknown:
        raise ValueError(
            f"backend liger: options['rewrites'] has {unknown[0]!r}; there are 'all' and"
            f" {list(REWRITES)}"
        )
    return names


def graph_pass(rewrites: Collection[str] | None = None) -> Any:
    """The rewrites of the backend `liger`, as a pass for those who compose their own.

        torch.compile(model, options={"pre_grad_custom_pass": liger_ops.graph_pass()})

    Its `uuid()` is a hash of this package, so that Inductor's caches stay usable and notice an
    upgrade. On a hit they skip the pass along with the compilation.

    Args:
        rewrites: the names of those to make, of `liger_ops.lowering.passes.REWRITES`, or "all";
            None for those that pay before Inductor.

    Returns:
        A `torch._inductor.custom_graph_pass.CustomGraphPass`.

    Raises:
        ValueError: there is no such rewrite.
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass

    names = chosen(rewrites, "inductor")

    class LigerGraphPass(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            declare_ops()
            rewrite_graph(graph, names)

        def uuid(self) -> str:
            return f"liger_ops {package_hash()} {','.join(sorted(names))}"

    return LigerGraphPass()
