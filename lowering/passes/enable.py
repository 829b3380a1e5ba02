"""The rewrites in every compilation by Inductor, whoever asks for it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch._inductor.config as inductor_config
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from .chosen import checked_strict, chosen
from .exported import exported_operator
from .graph_pass import LigerGraphPass


def enable(rewrites: str | Collection[str] | None = None, *, strict: bool | None = None) -> Enabled:
    """Let every `torch.compile` of this process that goes to Inductor use the ops.

        liger_ops.enable()
        model = torch.compile(model)

    Models stay untouched, and no backend is named: Trainer, TRL, accelerate and torchtitan get the
    rewrites by their own switches, such as `TrainingArguments(torch_compile=True)`. What is
    rewritten, and when a place is left alone, is as for `torch.compile(model, backend="liger")`;
    `liger_ops.explain` tells of both. An exported model, which AOTInductor compiles, is left as it
    is: `fuse` it before. Inductor's caches stay usable, and know one set of rewrites
    from another.

    It is Inductor's setting `pre_grad_custom_pass` that is changed. A pass that is there already
    runs first. `torch.compile(options={"pre_grad_custom_pass": ...})` of a single call takes its
    place, as of any setting. Functions that were compiled before stay as they are until they are
    compiled anew, as after `torch.compiler.reset()`.

    A second call replaces the first. The result undoes it as a context manager:

        with liger_ops.enable("all"):
            model(**batch)  # compiles here

    Args:
        rewrites: the names of those to make, of `liger_ops.lowering.passes.REWRITES`, or "all";
            None for those that pay before Inductor.
        strict: whether an exception in a rewrite is raised; by default the graph is left as it
            came, with a warning.

    Raises:
        TypeError: rewrites or strict is of another type.
        ValueError: there is no such rewrite.
    """
    before = inductor_config.pre_grad_custom_pass
    names = chosen(rewrites, True, "enable: rewrites")
    ours = Everywhere(LigerGraphPass(names, checked_strict(strict, "enable: strict")))
    others = _without_ours(before)
    inductor_config.pre_grad_custom_pass = Together(others, ours) if others else ours
    return Enabled(before)


def disable() -> None:
    """Undo `enable`. Functions that are compiled already stay as they are."""
    others = _without_ours(inductor_config.pre_grad_custom_pass)
    inductor_config.pre_grad_custom_pass = others[0] if len(others) == 1 else others or None


class Enabled:
    """The result of `enable`: leaving it as a context puts back what was set before."""

    def __init__(self, before: Any) -> None:
        self._before = before

    def __enter__(self) -> Enabled:
        return self

    def __exit__(self, *error: Any) -> None:
        inductor_config.pre_grad_custom_pass = self._before


class Everywhere(CustomGraphPass):
    """Our pass, for whatever Inductor compiles: an exported model is compiled as it is."""

    def __init__(self, ours: LigerGraphPass) -> None:
        self.ours = ours

    def __call__(self, graph: fx.Graph) -> None:
        if exported_operator(graph) is None:
            self.ours(graph)

    def uuid(self) -> str:
        return self.ours.uuid()


class Together(CustomGraphPass):
    """Passes of others, and then ours, as one."""

    def __init__(self, others: Sequence[Callable[[fx.Graph], None]], ours: CustomGraphPass) -> None:
        self.others, self.ours = others, ours

    def __call__(self, graph: fx.Graph) -> None:
        for one in self.others:
            one(graph)
        self.ours(graph)

    def uuid(self) -> Any:
        """None where a pass has none, so that nothing is cached, as without ours."""
        parts = [one.uuid() if isinstance(one, CustomGraphPass) else None for one in self.others]
        return None if None in parts else str([*parts, self.ours.uuid()])


def _without_ours(passes: Any) -> list[Any]:
    if passes is None or isinstance(passes, Everywhere):
        return []
    if isinstance(passes, Together):
        return list(passes.others)
    # From torch 2.13 on the setting may be a list.
    several = isinstance(passes, (tuple, list))
    return [one for part in passes for one in _without_ours(part)] if several else [passes]
