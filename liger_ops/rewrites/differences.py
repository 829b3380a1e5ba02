"""Compare the results of a changed model with those of the unchanged one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# Allowed difference between sums in different orders, in units of float32's epsilon.
SUMS = 8
# The difference of a gradient that is zero up to rounding, such as that of a key's bias, is
# measured relative to this share of the norm of all gradients. The same holds for outputs.
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
    """The distance between two runs' values: the norm of their difference over the value's norm.

    Attributes:
        name: "loss"; "output" and the output's name; or, for a gradient, the name of its parameter
            or input.
        difference: between the changed and the unchanged model; infinite if one of them has no such
            value.
        error: between the changed model and the truth; None without a truth.
        own_error: between the unchanged model and the truth: the error of the model's dtype. All
            gradients that are zero up to rounding have the largest of their errors; for a fused
            model, all gradients have the largest of all.
        eps: the epsilon of the narrowest dtype in the models.
        magnified: without a truth, the factor by which the model magnifies a rounding.
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
        """True if the error is at most twice that of the unchanged model, plus a rounding.

        Without a truth, True if the difference is at most ROUNDINGS roundings, each magnified as
        the model magnifies them.
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
        """True if the loss, every gradient and every output agree."""
        return not self.wrong

    @property
    def wrong(self) -> tuple[Difference, ...]:
        """The differences that are not explained by rounding."""
        return tuple(d for d in (*self.wide, *self.differences) if not d.agrees)

    def __str__(self) -> str:
        verdict = "agree" if self.agrees else "DO NOT AGREE"
        lines = [f"loss and {_gradients(self.differences)} {verdict}"]
        if self.wide:
            lines.append(f"  both models in {self.wide_dtype}: {_largest(self.wide)}")
            lines += _lines([d for d in self.wide if not d.agrees], None)
        elif self.why_not_wide:
            lines.append(f"  not compared with the unfused model in float64: {self.why_not_wide}")
        if self.truth is None:
            lines.append(f"  no run in a wider dtype to compare with: {self.why_no_truth}")
        wrong = [d for d in self.differences if not d.agrees]
        loss = [d for d in self.differences if d.name == LOSS and d.agrees]
        others = [d for d in self.differences if d.name != LOSS][:3]
        lines += _lines([*loss, *(wrong or others)], self.truth)
        return "\n".join(lines)


def _gradients(differences: Iterable[Difference]) -> str:
    count = sum(_group(d.name) == "" for d in differences)
    return f"{count} gradient{'s' * (count != 1)}"


def _largest(differences: Sequence[Difference]) -> str:
    """Write the largest difference of each group: "loss equal to 3e-16, 42 gradients to 1e-15"."""
    largest: dict[str, float] = {}
    # The differences are sorted, the largest first.
    for difference in differences:
        if not difference.missing:
            largest.setdefault(_group(difference.name), difference.difference)
    names = {LOSS: "loss", "": _gradients(differences), OUTPUT: "outputs"}
    equal = [f"{names[group]} to {largest[group]:.0e}" for group in names if group in largest]
    return ", ".join(equal).replace(" to ", " equal to ", 1)


def _lines(differences: Sequence[Difference], truth: torch.dtype | None) -> list[str]:
    lines = [_line(d, truth) for d in differences[:SHOWN]]
    more = len(differences) - SHOWN
    return [*lines, f"  and {more} more"] if more > 0 else lines


def _line(d: Difference, truth: torch.dtype | None) -> str:
    if d.missing:
        noun = "output" if _group(d.name) == OUTPUT else "gradient"
        return f"  {d.name}: no {noun} in the {d.missing} model"
    line = f"  {d.name}: differs by {d.difference:.1e} from the unchanged model"
    if d.error is not None:
        line += f"; from {truth} by {d.error:.1e}, before {d.own_error:.1e}"
    return f"{line}; eps {d.eps:.1e}"


def _group(name: str) -> str:
    """Return the group of a value: LOSS, OUTPUT, or "" for a gradient."""
    return LOSS if name == LOSS else OUTPUT if name.startswith(OUTPUT) else ""


def magnified(differences: Iterable[Difference]) -> float:
    """Return the factor by which a model magnifies a rounding: its own error over its epsilon."""
    factors = [
        d.own_error / d.eps
        for d in differences
        if d.own_error is not None and math.isfinite(d.own_error)
    ]
    return max([1.0, *factors]) if factors else ROUNDINGS


def compared(
    before: Mapping[str, Tensor], after: Mapping[str, Tensor],
    truth: Mapping[str, Tensor] | None, eps: float, magnified: float = 1.0,
) -> tuple[Difference, ...]:  # fmt: skip
    """Compute the difference of every result that the unchanged or the changed model has."""
    wide = {name: value.double() for name, value in (truth or before).items()}
    sizes = {name: x.nan_to_num(0.0, 0.0, 0.0).norm().item() for name, x in wide.items()}
    differences, noise = [], []
    for name in {**before, **after}:
        if name not in before or name not in after:
            missing = "changed" if name in before else "unchanged"
            differences.append(Difference(name, math.inf, None, None, eps, missing=missing))
            continue
        group = OUTPUT if _group(name) == OUTPUT else ""
        whole = math.hypot(*(size for key, size in sizes.items() if _group(key) == group))
        scale = max(sizes.get(name, 0.0), SMALLEST_SHARE * whole, 1e-300)

        def distance(x: Tensor, y: Tensor, scale: float = scale) -> float:
            if x.shape != y.shape:
                return math.inf
            x, y = x.double(), y.double()
            # Equal infinities have no difference; their subtraction would give NaN.
            relative = torch.where(x == y, 0.0, x - y).norm().item() / scale
            return math.inf if math.isnan(relative) else relative

        changed, unchanged = after[name], before[name]
        difference, error, own = distance(changed, unchanged), None, None
        if truth is not None:
            # Compiled code may return zeros for a gradient that the wide run does not have.
            exact = truth.get(name, torch.zeros_like(unchanged))
            error, own = distance(changed, exact), distance(unchanged, exact)
        differences.append(Difference(name, difference, error, own, eps, magnified))
        if sizes.get(name, 0.0) < SMALLEST_SHARE * whole and own is not None:
            noise.append(differences[-1])
    # These consist of rounding errors. How large one is among them is a matter of luck, so that
    # each is allowed the error of the largest.
    largest = max((d.own_error or 0.0 for d in noise), default=0.0)
    differences = [replace(d, own_error=largest) if d in noise else d for d in differences]
    return tuple(sorted(differences, key=lambda d: -d.difference))
