"""The public names of the package, and the pages of the reference that describe them."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.nn import Module

import liger_ops
from liger_ops import distributed, fusion, losses, nn

ROOT = Path(__file__).parents[2]
# Ops without a family.
OTHER = "Other ops"
# The measured bandwidth of an op, where there is a picture of it.
PLOT = "reports/plots/{}_bfloat16.png"


@dataclass(frozen=True)
class Page:
    """A page of the reference: its place, and the names that it describes."""

    section: tuple[str, ...]
    path: str
    title: str
    names: tuple[str, ...]
    before: str = ""
    after: str = ""

    def markdown(self) -> str:
        parts = [f"# {self.title}\n", self.before]
        for name in self.names:
            options = {"heading": name}
            if is_result(OBJECTS.get(name)):
                options |= {"members": "null", "inherited_members": "true"}
                options |= {"show_if_no_docstring": "false"}
            lines = [f"        {option}: {setting}" for option, setting in options.items()]
            parts.append("\n".join(["", f"::: {name}", "    options:", *lines, ""]))
        return "\n".join([*parts, self.after])


def is_result(value: Any) -> bool:
    """Return whether a public object is a class of results, whose methods a user calls."""
    return inspect.isclass(value) and not issubclass(value, Module)


def public() -> dict[str, Any]:
    """Return every public name with its object: those of `__all__`, and the classes of results."""
    named = {f"liger_ops.{name}": getattr(liger_ops, name) for name in liger_ops.__all__}
    named = {name: value for name, value in named.items() if not inspect.ismodule(value)}
    for module in (fusion, nn, losses, distributed):
        named |= {f"{module.__name__}.{name}": getattr(module, name) for name in module.__all__}
    del named["liger_ops.fusion.fuse"], named["liger_ops.fusion.unfuse"]
    for value in list(named.values()):
        for result in results(value):
            if result not in named.values():
                named[f"{result.__module__}.{result.__qualname__}"] = result
    return named


def results(function: Any) -> list[type]:
    """Return the documented classes of this package that a function is annotated to return."""
    if not inspect.isfunction(function):
        return []
    names = [f.__annotations__.get("return") for f in (function, *typing.get_overloads(function))]
    known = vars(sys.modules[function.__module__])
    values = [known.get(name) for name in names if isinstance(name, str)]
    return [
        value
        for value in values
        if inspect.isclass(value) and value.__module__.startswith("liger_ops.") and value.__doc__
    ]


OBJECTS = public()


def pages() -> list[Page]:
    return [*_entry_points(), *_ops(), *_other_modules(), *_rest(), *_integrations()]


def _entry_points() -> Iterator[Page]:
    for name, value in OBJECTS.items():
        short = name.removeprefix("liger_ops.")
        if "." in short or value.__module__.startswith("liger_ops.ops"):
            continue
        returned = [other for result in results(value) for other in names_of(result)]
        yield Page(("Entry points",), f"reference/{short}.md", short, (name, *returned))


def _ops() -> Iterator[Page]:
    """Yield a page for each op: with its `_forward`, which returns more, and its modules."""
    modules = modules_of_ops()
    pages = [*_pages_of_ops(modules)]
    yield from sorted(pages, key=lambda page: (page.section[-1] == OTHER, page.section, page.title))


def _pages_of_ops(modules: dict[str, list[str]]) -> Iterator[Page]:
    for name in OBJECTS:
        op = name.removeprefix("liger_ops.")
        if "." in op or not OBJECTS[name].__module__.startswith("liger_ops.ops"):
            continue
        if op.endswith("_forward"):
            continue
        family = OBJECTS[name].__module__.removeprefix("liger_ops.ops.").split(".")[0]
        is_family = (ROOT / "liger_ops/ops" / family).is_dir()
        more = [other for other in (f"{name}_forward",) if other in OBJECTS]
        plot = PLOT.format(op)
        measured = (
            "## Measured\n\n"
            f"![The share of an H200's copy bandwidth that {op} reaches, by width](/{plot})\n\n"
            "[Every shape, and every peer](/reports/benchmarks.md).\n"
            if (ROOT / "docs" / plot).exists()
            else ""
        )
        yield Page(
            ("Ops", titled(family) if is_family else OTHER),
            f"reference/ops/{op}.md",
            op,
            (name, *modules.get(op, ()), *more),
            after=measured,
        )


def modules_of_ops() -> dict[str, list[str]]:
    """Return the modules of each op, which their docstrings name."""
    found: dict[str, list[str]] = {}
    for name in nn.__all__:
        for op in re.findall(r"^See `liger_ops\.(\w+)`", getattr(nn, name).__doc__ or "", re.M):
            found.setdefault(op, []).append(f"liger_ops.nn.{name}")
    return found


def _other_modules() -> Iterator[Page]:
    told = {name for names in modules_of_ops().values() for name in names}
    names = [f"liger_ops.nn.{name}" for name in sorted(nn.__all__)]
    listed = "\n".join(f"- [`{name.split('.')[-1]}`][{name}]" for name in names)
    own = tuple(name for name in names if name not in told)
    text = "A module of `liger_ops.nn` stands on the page of its op, or below:"
    text = f"{text}\n\n{listed}\n{{ .columns }}\n"
    yield Page((), "reference/nn.md", "Modules", own, text)


def _rest() -> Iterator[Page]:
    for title, module in (("Losses", losses), ("Distributed", distributed)):
        for name in module.__all__:
            short = module.__name__.removeprefix("liger_ops.")
            path = f"reference/{short}/{name}.md"
            yield Page((title,), path, name, (f"{module.__name__}.{name}",))


def _integrations() -> Iterator[Page]:
    """Yield a page for each module that a user imports: those with an `__all__` or an `install`.

    They are read and not imported: each needs the project that it is for.
    """
    for file in sorted((ROOT / "liger_ops/integrations").glob("[a-z]*.py")):
        body = ast.parse(file.read_text(encoding="utf-8")).body
        functions = [node.name for node in body if isinstance(node, ast.FunctionDef)]
        listed = [
            ast.literal_eval(node.value)
            for node in body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        ]
        names = listed[0] if listed else [n for n in functions if n in ("install", "uninstall")]
        name = f"liger_ops.integrations.{file.stem}"
        parameters = {n.name: len(n.args.args) for n in body if isinstance(n, ast.FunctionDef)}
        if "install" in parameters and parameters["install"] or not names:
            continue
        text = f"::: {name}\n    options:\n        show_root_heading: false\n"
        shown = tuple(f"{name}.{function}" for function in names)
        path = f"reference/integrations/{file.stem}.md"
        yield Page(("Integrations",), path, file.stem, shown, text)


def names_of(value: Any) -> list[str]:
    return [name for name, other in OBJECTS.items() if other is value]


def titled(name: str) -> str:
    return name.replace("_", " ").capitalize()
