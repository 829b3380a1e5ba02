"""Parts of a module that follow from its op: the documentation, and the options."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import fields
from numbers import Integral
from typing import Any, ClassVar, TypeVar

from torch import Tensor, empty, int64, nn

Class = TypeVar("Class", bound=type)

_SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Source|Example):(?=\s)", re.MULTILINE)
_BLOCK = re.compile(r"^ {4}.*(?:\n+ {4}.*)*", re.MULTILINE)
_ENTRY = re.compile(r"^ {4}(\w+(?:,\s+\w+)*): (.*(?:\n {8}.*)*)", re.MULTILINE)

# Descriptions of constructor parameters that several modules have, but no op.
_COMMON = """
    hidden_size: the size N of the last dimension; None for any size, only without a weight.
    elementwise_affine: whether the module has a weight.
    device, dtype: the device and dtype of the parameters.
"""


def documented(op: Callable[..., Any], **as_in_op: str) -> Callable[[Class], Class]:
    """Complete the docstring of a module that calls `op` with parts of the op's docstring.

    The docstring of the class says what the module is, describes under "Args" the parameters that
    the op lacks, and has "Attributes" and an "Example". The rest comes from the op: the equation,
    the other arguments, the shapes, the result and the errors. `as_in_op` maps arguments of
    `forward` to the op's: input="x" means that input is the op's x.
    """

    def decorate(cls: Class) -> Class:
        if cls.__doc__ and op.__doc__:
            cls.__doc__ = _docstring(cls, op, as_in_op)
        return cls

    return decorate


def _docstring(cls: type, op: Callable[..., Any], as_in_op: dict[str, str]) -> str:
    op_text = op.__doc__ or ""
    for in_module, in_op in as_in_op.items():
        op_text = re.sub(rf"\b{in_op}\b", in_module, op_text)
    own, of_op = sections(cls.__doc__), sections(op_text)
    # The first indented block is the equation. A class may write its own.
    equation = None if _BLOCK.search(own[""]) else _BLOCK.search(of_op[""])
    # Later descriptions override earlier ones.
    texts = entries(of_op["Args"]) | entries(_COMMON) | entries(own.get("Args", ""))
    text = [own[""], *([equation.group()] if equation else [])]
    text.append(f"See `liger_ops.{op.__name__}` for precision, memory and gradient.")
    bodies = {
        "Args": described(_arguments(cls.__init__), texts),  # type: ignore[misc]
        "Attributes": own.get("Attributes"),
        "Shape": described(_arguments(cls.forward), texts),  # type: ignore[attr-defined]
        **{name: own.get(name, of_op[name]) for name in ("Returns", "Raises")},
        "Example": own.get("Example"),
    }
    text += [f"{name}:\n{body}" for name, body in bodies.items() if body]
    return "\n\n".join(text) + "\n"


def _arguments(method: Callable[..., Any]) -> tuple[str, ...]:
    # Not by inspect.signature, which would take a tenth of the time of `import liger_ops`.
    code = method.__code__
    return code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]


def sections(docstring: str | None) -> dict[str, str]:
    """Return the sections of a docstring by their titles, and under "" the text before them."""
    text, *parts = _SECTION.split(inspect.cleandoc(docstring or ""))
    bodies = (part.strip("\n") for part in parts[1::2])
    return {"": text.strip(), **dict(zip(parts[::2], bodies, strict=True))}


def entries(section: str) -> dict[str, str]:
    """Return the description of each name in a section; names before a colon share one."""
    return {
        name: text for names, text in _ENTRY.findall(section) for name in re.split(r",\s+", names)
    }


def described(names: Iterable[str], described: dict[str, str]) -> str:
    """Write a section: one entry for each run of names that have the same description."""
    lines: list[tuple[list[str], str]] = []
    for name in names:
        if lines and described[name] == lines[-1][1]:
            lines[-1][0].append(name)
        else:
            lines.append(([name], described[name]))
    return "\n".join(f"    {', '.join(group)}: {text}" for group, text in lines)


class OptionsModule(nn.Module):
    """A dataclass without parameters, whose fields are the options of an op, in the op's order."""

    # If False, repr leaves out the options that have their default values.
    shows_defaults: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__init__()
        self._names = tuple(field.name for field in fields(self))  # type: ignore[arg-type]
        self._check()

    def _check(self) -> None:
        """Raise the op's own errors for wrong options now, not at the first forward."""

    @property
    def options(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self._names)

    def extra_repr(self) -> str:
        defaults = {field.name: field.default for field in fields(self)}  # type: ignore[arg-type]
        shown = [
            name
            for name in self._names
            if self.shows_defaults or getattr(self, name) != defaults[name]
        ]
        return named(self, *shown)


def named(module: nn.Module, *names: str) -> str:
    """Return attributes as repr shows them: "eps=1e-06, offset=0.0"."""
    return ", ".join(f"{name}={getattr(module, name)!r}" for name in names)


def no_rows(width: int = 1, **options: Any) -> Tensor:
    """Create a tensor without rows. An op that is called with it only checks its options."""
    return empty(0, width, device="meta", **options)


def no_target() -> Tensor:
    return empty(0, dtype=int64, device="meta")


def check_size(owner: str, name: str, size: int) -> None:
    if not isinstance(size, Integral):
        raise TypeError(f"{owner}: {name} must be an int, got {type(size).__name__}")
    if size < 1:
        raise ValueError(f"{owner}: {name} must be at least 1, got {size}")
