"""How far the results of a changed model are from those of the unchanged one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# Allowed difference of sums in another order, in units of float32's epsilon.
SUMS = 8
# A gradient that is zero up to rounding, such as that of a key's bias, is measured relative to this
# share of the norm of all gradients. The same holds for outputs.
SMALLEST_SHARE = 1e-3
# Allowed difference without a truth, in units of the dtype's epsilon.
ROUNDINGS = 64

# Number of values that a report names.
SHOWN = 6

LOSS = "loss"
# Start of the name of an output.
OUTPUT = "output "


@dataclass(frozen=True)
class Difference:
    """How far a value moved, as the norm of the difference divided by the norm of the value.

    Attributes:
        name: "loss", "output" and its name, or the name of the parameter or input whose gradient
            it is.
        difference: between the changed and the unchanged model; infinite if one of them has no such
            value.
        error: between the changed model and the truth; None without a truth.
        own_error: between the unchanged model and the truth, which is the error of its dtype. For
            gradients that are zero up to rounding, the largest of theirs; for those of a fused
            model, the largest of all.
        eps: the epsilon of the narrowest dtype in the models.
        magnified: without a truth, how many times the model magnifies a rounding.
        missing: "changed" or "unchanged", the model that has no such value; or "".
    """

    name: str
    difference: float
    error: float | None
    own_error: float | None
    eps: float
    magnified: float = 1.0
    missing: str = ""

    @property
    def is_gradient(self) -> bool:
        return _group(self.name) == ""

    @property
    def agrees(self) -> bool:
        """Whether the error is at most twice that of the unchanged model, plus a rounding.

        Without a truth: whether the difference is within ROUNDINGS of the unchanged model, each
        magnified as the model does.
        """
        if self.error is None or self.own_error is None:
            return self.difference <= ROUNDINGS * self.magnified * self.eps
        return self.error <= 2 * self.own_error + self.eps + SUMS * torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Verification:
    """The measurement that `explain(verify=True)` and `fuse(verify=batch)` make.

    Attributes:
        differences: those of the loss and of each gradient, the largest first.
        truth: the dtype of the truth, or None.
        why_no_truth: the reason if it is None, one clause.
        wide: for a fused model, the differences between it and the unfused model where both
            compute in `wide_dtype`, those of outputs too, the largest first.
        wide_dtype: float64, or float32 for a half-precision model that lacks float64, or None.
        why_not_wide: for a fused model, the reason if it is None, one clause.
    """

    differences: tuple[Difference, ...]
    truth: torch.dtype | None
    why_no_truth: str = ""
    wide: tuple[Difference, ...] = ()
    wide_dtype: torch.dtype | None = None
    why_not_wide: str = ""

    @property
    def agrees(self) -> bool:
        """Whether the loss, every gradient and every output agree."""
        return not self.wrong

    @property
    def wrong(self) -> tuple[Difference, ...]:
        """The differences that are not explained by rounding."""
        return tuple(one for one in (*self.wide, *self.differences) if not one.agrees)

    def __str__(self) -> str:
        verdict = "agree" if self.agrees else "DO NOT AGREE"
        lines = [f"loss and {_gradients(self.differences)} {verdict}"]
        if self.wide:
            lines.append(f"  both models in {self.wide_dtype}: {_largest(self.wide)}")
            lines += _lines([one for one in self.wide if not one.agrees], None)
        elif self.why_not_wide:
            lines.append(f"  not compared with the unfused model in float64: {self.why_not_wide}")
        if self.truth is None:
            lines.append(f"  no run in a wider dtype to compare with: {self.why_no_truth}")
        wrong = [one for one in self.differences if not one.agrees]
        loss = [one for one in self.differences if one.name == LOSS and one.agrees]
        others = [one for one in self.differences if one.name != LOSS][:3]
        lines += _lines([*loss, *(wrong or others)], self.truth)
        return "\n".join(lines)


def _gradients(differences: Iterable[Difference]) -> str:
    count = sum(_group(one.name) == "" for one in differences)
    return f"{count} gradient{'s' * (count != 1)}"


def _largest(differences: Sequence[Difference]) -> str:
    """Such as "loss equal to 3e-16, 42 gradients to 1e-15"."""
    found: dict[str, float] = {}
    for one in differences:
        if not one.missing:
            found.setdefault(_group(one.name), one.difference)
    names = {LOSS: "loss", "": _gradients(differences), OUTPUT: "outputs"}
    equal = [f"{names[group]} to {found[group]:.0e}" for group in names if group in found]
    return ", ".join(equal).replace(" to ", " equal to ", 1)


def _lines(differences: Sequence[Difference], truth: torch.dtype | None) -> list[str]:
    lines = [_line(one, truth) for one in differences[:SHOWN]]
    more = len(differences) - SHOWN
    return [*lines, f"  and {more} more"] if more > 0 else lines


def _line(one: Difference, truth: torch.dtype | None) -> str:
    if one.missing:
        noun = "output" if _group(one.name) == OUTPUT else "gradient"
        return f"  {one.name}: no {noun} in the {one.missing} model"
    line = f"  {one.name}: differs by {one.difference:.1e} from the unchanged model"
    if one.error is not None:
        line += f"; from {truth} by {one.error:.1e}, before {one.own_error:.1e}"
    return f"{line}; eps {one.eps:.1e}"


def _group(name: str) -> str:
    """LOSS, OUTPUT, or "" for a gradient."""
    return LOSS if name == LOSS else OUTPUT if name.startswith(OUTPUT) else ""


def magnified(differences: Iterable[Difference]) -> float:
    """How many times a model magnifies a rounding: its own error in units of its epsilon."""
    known = [
        one.own_error / one.eps
        for one in differences
        if one.own_error is not None and math.isfinite(one.own_error)
    ]
    return max([1.0, *known]) if known else ROUNDINGS


def compared(
    before: Mapping[str, Tensor], after: Mapping[str, Tensor],
    truth: Mapping[str, Tensor] | None, eps: float, magnified: float = 1.0,
) -> tuple[Difference, ...]:  # fmt: skip
    """The difference of every result that the unchanged or the changed model has."""
    wide = {name: value.double() for name, value in (truth or before).items()}
    sizes = {name: x.nan_to_num(0.0, 0.0, 0.0).norm().item() for name, x in wide.items()}
    found, noise = [], []
    for name in {**before, **after}:
        if name not in before or name not in after:
            missing = "changed" if name in before else "unchanged"
            found.append(Difference(name, math.inf, None, None, eps, missing=missing))
            continue
        kind = OUTPUT if _group(name) == OUTPUT else ""
        whole = math.hypot(*(size for one, size in sizes.items() if _group(one) == kind))
        scale = max(sizes.get(name, 0.0), SMALLEST_SHARE * whole, 1e-300)

        def distance(x: Tensor, y: Tensor, scale: float = scale) -> float:
            if x.shape != y.shape:
                return math.inf
            x, y = x.double(), y.double()
            moved = torch.where(x == y, 0.0, x - y).norm().item() / scale
            return math.inf if math.isnan(moved) else moved

        one, other = after[name], before[name]
        moved, error, own = distance(one, other), None, None
        if truth is not None:
            # Compiled code may give zeros for a gradient that there is not.
            exact = truth.get(name, torch.zeros_like(other))
            error, own = distance(one, exact), distance(other, exact)
        found.append(Difference(name, moved, error, own, eps, magnified))
        if sizes.get(name, 0.0) < SMALLEST_SHARE * whole and own is not None:
            noise.append(found[-1])
    # Rounding alone makes these: its size in one of them is a matter of luck.
    largest = max((one.own_error or 0.0 for one in noise), default=0.0)
    found = [replace(one, own_error=largest) if one in noise else one for one in found]
    return tuple(sorted(found, key=lambda one: -one.difference))
