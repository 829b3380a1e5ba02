"""The Dynamo backend `liger`: the rewrites, then Inductor or another backend."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from ..torch_private import CompileInductorWrapper, CompileWrapper
from . import rewrite
from .attention.runtime.mask_inputs import MASKS, put_back
from .attention.runtime.mask_outputs import with_data
from .attention.runtime.padding import PADDING, assume_ones
from .attention.runtime.variants import Variants, is_split
from .default_rewrites import check_known, checked_flag, chosen
from .losses.losses import warn

Compiled = Callable[..., Any]
# Names of the rewrites that read masks.
MASKED = {"causal_attention", "masked_attention", "eager_attention"}
InnerBackend = str | Callable[..., Compiled]


def liger(
    module: fx.GraphModule, example_inputs: Sequence[Any], *,
    mode: str | None = None, options: Mapping[str, Any] | None = None,
) -> Compiled:  # fmt: skip
    """Compile with the ops of this package wherever the graph computes what they compute.

        torch.compile(model, backend="liger")

    The rewrites run on Dynamo's graph, before autograd, where the operations are still those of the
    user's code. Nodes that compute an op are replaced by the op, and the graph then goes to
    Inductor or another backend. `liger_ops.explain` lists what is replaced, what is not, and why.
    `liger_ops.enable` does the same for every compilation by Inductor.

    `mode`, `dynamic`, `fullgraph` and `options` of `torch.compile` work as usual, and this backend
    adds five options:

    * "mode": the mode, because `torch.compile` does not accept both mode and options.
    * "inner_backend": the backend that compiles the rewritten graph, a name or a function. Default:
      "inductor".
    * "rewrites": names from `liger_ops.rewrites.REWRITES`, or "all". Default: before
      Inductor all but `default_rewrites.KEPT_BY_INDUCTOR`, before another backend all.
    * "padding": what is known of the attention_mask. By default each call checks whether it is 1
      everywhere, which waits for the device once; batches for which it is run causal attention,
      compiled separately. False promises that every batch is full, which the device checks; True
      says that batches have padding, so that the mask is not read.
    * "strict": whether an exception in a rewrite is raised. By default the graph is compiled
      without any rewrite, with a warning; LIGER_OPS_STRICT=1 in the environment makes True the
      default.

    A rewrite is made only if it is exact: the same equation, casting mode, eps and offset, and a
    result of the same dtype, sizes, device and strides (or strides that the graph cannot observe).
    No intermediate value may be used elsewhere or written in place, and nothing may be random.
    Intermediate rounding may be omitted, as Inductor does: rope, the gated activations and the
    scale and softcap of logits compute in float32 and round once. A rewrite erases only the nodes
    that it replaces. Autograd functions and code under torch.func transforms are not rewritten.

    Raises:
        TypeError: options["inner_backend"] is neither a name nor a function, options["rewrites"] is
            neither a name nor a list of names, or options["padding"] or options["strict"] is not a
            bool.
        ValueError: options["rewrites"] names a rewrite that does not exist, or one that only runs
            before Inductor; options has a name that neither this backend nor Inductor knows.
    """
    rest = dict(options or {})
    mode = rest.pop("mode", mode)
    inner: InnerBackend = rest.pop("inner_backend", "inductor")
    if not isinstance(inner, str) and not callable(inner):
        raise TypeError(
            "backend liger: options['inner_backend'] must be a backend's name or a function, got"
            f" {type(inner).__name__}"
        )
    names = chosen(
        rest.pop("rewrites", None), inner == "inductor", "backend liger: options['rewrites']"
    )
    strict = checked_flag(rest.pop("strict", None), "backend liger: options['strict']")
    padding = checked_flag(rest.pop("padding", None), "backend liger: options['padding']")
    check_known(rest, inner == "inductor")

    def compiled(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Compiled:
        warn(rewrite(module, names, strict=strict).findings)
        put_back(module)
        if inner == "inductor":
            return CompileInductorWrapper(mode, rest, dynamic=None)(module, example_inputs)
        return CompileWrapper(inner, mode, rest, dynamic=None)(module, example_inputs)

    def looking(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Compiled:
        nonlocal names
        looks = "causal_attention" in names and padding is not True
        looks = looks and (padding is False or not is_split(example_inputs))
        places = PADDING.found(module, strict) if looks else []
        if places is None:
            # The search failed, with a warning. The graph is compiled without any rewrite.
            names = ()
        if not places:
            return compiled(module, example_inputs)
        if padding is False:
            assume_ones(module, places, check=True)
            return compiled(module, example_inputs)
        return Variants(module, example_inputs, PADDING, places, compiled)

    if MASKED.isdisjoint(names):
        return compiled(module, example_inputs)
    wrap = with_data(module, strict)
    places = None if is_split(example_inputs) else MASKS.found(module, strict)
    graph = (module, example_inputs)
    run = Variants(*graph, MASKS, places, looking) if places else looking(*graph)
    return run if wrap is None else wrap(run)


def _reset() -> None:
    # Dynamo iterates over its backends meanwhile, to which the import of this module adds one.
    if "torch._inductor.cudagraph_trees" in sys.modules:
        from ..torch_private import reset_cudagraph_trees

        reset_cudagraph_trees()


# torch.compiler.reset calls `reset` of every backend that has one.
liger.reset = _reset  # type: ignore[attr-defined]
