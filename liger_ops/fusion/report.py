"""The report that `fuse` returns."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..rewrites.differences import Verification
from ..rewrites.engine.report import Finding, Findings
from ..rewrites.explain import table


@dataclass(frozen=True)
class FuseReport(Findings):
    """The report of `fuse`: its changes, and what it left. `print` shows a table of both.

    A module that looks fusible but was left is a finding with a reason. The length is the number
    of changes.
    """

    findings: tuple[Finding, ...] = ()
    # The kinds of parts for which `fuse` looked.
    kinds: tuple[str, ...] = field(default=(), compare=False)
    verification: Verification | None = None
    # The type of the device of the model's parameters.
    device: str = field(default="", compare=False)

    @property
    def fused(self) -> tuple[Finding, ...]:
        """The modules that were changed, each with the op and its options."""
        return tuple(finding for finding in self.findings if finding.used)

    def __len__(self) -> int:
        return len(self.fused)

    def __str__(self) -> str:
        lines = table(self.findings, self.device)
        if not self.findings:
            lines += [
                f"  looked for: {', '.join(self.kinds)}",
                "  next: liger_ops.explain(model, *inputs) says what backend='liger' finds",
            ]
        verified = [] if self.verification is None else [str(self.verification)]
        return "\n".join([*lines, *verified])
