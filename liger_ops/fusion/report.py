"""The report that `fuse` returns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Fused:
    """A module that `fuse` changed: its name in the model (empty for the model itself), its class,
    the op, the op's options, and the kind of part."""

    name: str
    class_name: str
    op: str
    options: dict[str, Any]
    kind: str = "norm"

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"{self.class_name} -> {self.op}({options})"


@dataclass(frozen=True)
class Left:
    """A module that looks fusible but was left: its name in the model (empty for the model itself),
    its class, the reason, and the kind of part."""

    name: str
    class_name: str
    reason: str
    kind: str = "loss"

    def __str__(self) -> str:
        return f"{self.class_name}: {self.reason}"


@dataclass(frozen=True)
class FuseReport:
    """Lists what `fuse` changed and what it left. Its length is the number of changes."""

    fused: tuple[Fused, ...] = ()
    left: tuple[Left, ...] = ()

    def __len__(self) -> int:
        return len(self.fused)

    def __str__(self) -> str:
        kinds = Counter(entry.kind for entry in self.fused)
        counts = ", ".join(_counted(count, kind) for kind, count in kinds.items())
        lines = [f"{counts or 'nothing'} fused", *_table(self.fused)]
        if self.left:
            lines += [f"{len(self.left)} left", *_table(self.left)]
        return "\n".join(lines)


def _counted(count: int, noun: str) -> str:
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun}{'es' if noun.endswith('s') else 's'}"


def _table(entries: Sequence[Fused | Left]) -> list[str]:
    """One line per distinct entry: the count, the text, and where the first one is."""
    counts = Counter(str(entry) for entry in entries)
    first = {str(entry): entry.name or "(the model itself)" for entry in reversed(entries)}
    return [
        f"  {count} x {text}  {first[text]}{', ...' if count > 1 else ''}"
        for text, count in counts.items()
    ]
