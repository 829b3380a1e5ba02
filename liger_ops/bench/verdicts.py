"""What the figures of a run say: which targets are met, and where another provider is faster."""

from __future__ import annotations

from dataclasses import dataclass

from . import targets
from .points import Points
from .providers import LOW_MEMORY, OURS


@dataclass(frozen=True)
class Verdict:
    """A target and what was found."""

    kernel: str
    shape: str
    mode: str
    met: bool
    text: str
    dtype: str = targets.DTYPE


@dataclass(frozen=True)
class Loss:
    """A row in which another provider is faster by more than targets.BEHIND."""

    kernel: str
    dtype: str
    shape: str
    mode: str
    winner: str
    ms: float
    ours_ms: float

    @property
    def text(self) -> str:
        behind = self.ours_ms / self.ms - 1
        return f"{self.winner} {self.ms:.3f} ms, liger_ops {self.ours_ms:.3f}: {behind:.0%} more"


def verdicts(points: Points) -> list[Verdict]:
    """Of every target whose row was measured, or failed; none of those that were not run."""
    found = []
    for kernel, dtype, shape, mode in points.rows():
        target = targets.SHARES.get((kernel, shape), {}).get(mode)
        ran = points.get(kernel, dtype, shape, mode, OURS)
        if dtype != targets.DTYPE or target is None or ran is None:
            continue
        share = points.value(kernel, dtype, shape, mode, OURS, "share")
        if share is None:
            found.append(Verdict(kernel, shape, mode, False, f"{target:.0f}%: {ran.note}"))
        else:
            # As the table prints it: a target is given in whole percents.
            met = round(share) >= target
            found.append(Verdict(kernel, shape, mode, met, f"{target:.0f}%: {share:.0f}%"))
    return found + _memory(points) + _host(points)


def _memory(points: Points) -> list[Verdict]:
    found = []
    for kernel, dtype, shape, mode in points.rows("memory"):
        peak = points.value(kernel, dtype, shape, mode, OURS, "memory")
        gradients = points.value(kernel, dtype, shape, mode, OURS, "gradients")
        if kernel != "linear_cross_entropy" or dtype != targets.DTYPE:
            continue
        if (kernel, shape) not in targets.SHARES or peak is None or gradients is None:
            continue
        beyond = peak - gradients
        text = (
            f"{targets.MB_BEYOND_GRADIENTS:.0f} MB beyond the gradients' {gradients:.0f}:"
            f" {beyond:.0f} MB"
        )
        found.append(Verdict(kernel, shape, "memory", beyond <= targets.MB_BEYOND_GRADIENTS, text))
    return found


def _host(points: Points) -> list[Verdict]:
    kernel, shape, mode = targets.HOST_OF
    ours = points.value(kernel, targets.DTYPE, shape, mode, OURS, "host")
    found = []
    for peer in targets.HOST_PEERS:
        theirs = points.value(kernel, targets.DTYPE, shape, mode, peer, "host")
        if ours is not None and theirs is not None:
            text = f"host {targets.HOST_SHARE:.0%} of {peer}'s {theirs:.0f} us: {ours:.0f} us"
            met = ours <= targets.HOST_SHARE * theirs
            found.append(Verdict(kernel, shape, "host", met, text))
    return found


def losses(points: Points) -> list[Loss]:
    found = []
    for kernel, dtype, shape, mode in points.rows():
        ours = points.value(kernel, dtype, shape, mode, OURS)
        others = {
            name: ms
            for name in points.providers()
            if name not in (OURS, LOW_MEMORY)
            and (ms := points.value(kernel, dtype, shape, mode, name)) is not None
        }
        if ours is None or not others:
            continue
        winner = min(others, key=others.__getitem__)
        if ours > others[winner] * (1 + targets.BEHIND):
            found.append(Loss(kernel, dtype, shape, mode, winner, others[winner], ours))
    return found


def failures(points: Points) -> list[str]:
    """What of liger_ops itself failed."""
    return [
        f"{p.kernel} {p.shape} {p.dtype} {p.mode}: {p.note}"
        for p in points
        if p.provider in (OURS, LOW_MEMORY) and p.value is None and p.note
    ]
