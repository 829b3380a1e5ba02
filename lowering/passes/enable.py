"""Run the rewrites in every compilation by Inductor in this process."""

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

    Models do not change, and no backend has to be named: Trainer, TRL, accelerate and torchtitan
    use the rewrites through their own switches, such as `TrainingArguments(torch_compile=True)`.
    The rewrites are those of `torch.compile(model, backend="liger")`, and `liger_ops.explain`
    describes them. An exported model, which AOTInductor compiles, is not rewritten: call `fuse`
    before exporting. Inductor's caches stay valid, and are keyed by the set of rewrites.

    This function sets Inductor's `pre_grad_custom_pass`. A pass that is already set runs first. A
    single call with `torch.compile(options={"pre_grad_custom_pass": ...})` overrides it, as it does
    any setting. Functions that are already compiled change only when they are compiled again, as
    after `torch.compiler.reset()`.

    A second call replaces the first. The result is a context manager that undoes the call:

        with liger_ops.enable("all"):
            model(**batch)  # compiles here

    Args:
        rewrites: names from `liger_ops.lowering.passes.REWRITES`, or "all"; None for the default
            before Inductor.
        strict: whether an exception in a rewrite is raised; by default the graph stays unchanged,
            with a warning.

    Raises:
        TypeError: rewrites or strict has another type.
        ValueError: rewrites names a rewrite that does not exist.
    """
    before = inductor_config.pre_grad_custom_pass
    names = chosen(rewrites, True, "enable: rewrites")
    ours = Everywhere(LigerGraphPass(names, checked_strict(strict, "enable: strict")))
    others = _without_ours(before)
    inductor_config.pre_grad_custom_pass = Together(others, ours) if others else ours
    return Enabled(before)


def disable() -> None:
    """Undo `enable`. Functions that are already compiled do not change."""
    others = _without_ours(inductor_config.pre_grad_custom_pass)
    inductor_config.pre_grad_custom_pass = others[0] if len(others) == 1 else others or None


class Enabled:
    """The result of `enable`: as a context manager it restores the previous setting."""

    def __init__(self, before: Any) -> None:
        self._before = before

    def __enter__(self) -> Enabled:
        return self

    def __exit__(self, *error: Any) -> None:
        inductor_config.pre_grad_custom_pass = self._before


class Everywhere(CustomGraphPass):
    """The pass for every graph that Inductor compiles; it skips exported models."""

    def __init__(self, ours: LigerGraphPass) -> None:
        self.ours = ours

    def __call__(self, graph: fx.Graph) -> None:
        if exported_operator(graph) is None:
            self.ours(graph)

    def uuid(self) -> str:
        return self.ours.uuid()


class Together(CustomGraphPass):
    """Other passes, followed by ours, as one pass."""

    def __init__(self, others: Sequence[Callable[[fx.Graph], None]], ours: CustomGraphPass) -> None:
        self.others, self.ours = others, ours

    def __call__(self, graph: fx.Graph) -> None:
        for one in self.others:
            one(graph)
        self.ours(graph)

    def uuid(self) -> Any:
        """None if another pass has none: Inductor then caches nothing, as it would without ours."""
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
