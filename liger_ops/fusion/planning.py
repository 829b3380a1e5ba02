"""Plans of the changes to a model. All plans are complete before anything is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..rewrites.engine.report import Finding
from . import classes
from .probing import NotAnOp, first_line


class FusionPlan:
    """The findings of one fuser in a model, and the changes that it will make.

    Attributes:
        kind: the kind of the findings.
        findings: the modules to be fused, and those that are left, with the reason.
        changes: functions without arguments, each of which makes one change.
    """

    def __init__(
        self, kind: str, model: nn.Module, look: Callable[[FusionPlan, str, nn.Module], None]
    ) -> None:
        """Call `look` for every module of a model.

        `look` adds findings and changes to the plan, and raises NotAnOp for a module that is left.
        A module for which it raises any other exception is left too.
        """
        self.kind = kind
        self.findings: list[Finding] = []
        self.changes: list[Callable[[], object]] = []
        for name, module in model.named_modules():
            try:
                look(self, name, module)
            except NotAnOp as reason:
                self.leave(name, module, str(reason))
            except Exception as error:
                self.leave(name, module, f"it cannot be probed: {first_line(error)}")

    def leave(self, name: str, module: nn.Module, reason: str) -> None:
        self._find("", reason, name, module, {})

    def fuse(
        self, name: str, module: nn.Module, op: str, options: dict[str, Any], logits_bytes: int = 0
    ) -> None:
        self._find(op, None, name, module, options, logits_bytes)

    def _find(
        self, op: str, reason: str | None, name: str, module: nn.Module, options: dict[str, Any],
        logits_bytes: int = 0,
    ) -> None:  # fmt: skip
        class_name = classes.class_of(module).__name__
        self.findings.append(
            Finding(op, reason, name, "", class_name, self.kind, options, logits_bytes)
        )


@contextmanager
def wholly_or_not_at_all(model: nn.Module) -> Iterator[None]:
    """Run the body, and restore the class of every module of a model if it raises."""
    before = [(module, type(module)) for module in model.modules()]
    try:
        yield
    except BaseException:
        for module, cls in before:
            if type(module) is not cls:
                module.__class__ = cls
        raise
