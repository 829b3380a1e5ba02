"""The names of Liger-Kernel and what replaces each, read from `names.toml`.

The file is read as text: neither Liger-Kernel nor the ops are imported.
"""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = "liger_kernel"


class Option(NamedTuple):
    """An argument of Liger-Kernel, and the argument of that value here.

    `theirs` is empty where the replacement is always given `value`, and `ours` where the option has
    no counterpart. `value` is Python code, passed where a call does not give the option.
    """

    theirs: str
    ours: str
    value: str


class NameRow(NamedTuple):
    """A name of Liger-Kernel, and what replaces it.

    `here` is a dotted name to which `options` are passed, or code where these are None, or empty.
    """

    section: str
    package: str
    name: str
    here: str
    options: tuple[Option, ...] | None
    call: tuple[Option, ...]
    note: str

    @property
    def imports(self) -> str:
        """The statement that imports what `here` names; empty where it is empty."""
        used = dict.fromkeys(re.findall(r"(?<![\w.])(?:torch|transformers)(?=\.)", self.here))
        return f"import {', '.join(['liger_ops', *used])}" if self.here else ""


class Replacement(NamedTuple):
    """Code, which is empty where there is no counterpart, and what a reader should know of it."""

    code: str
    remarks: tuple[str, ...]

    def __str__(self) -> str:
        remarks = "; ".join(self.remarks)
        if not self.code:
            return f"none: {remarks}"
        return f"{self.code}  # {remarks}" if remarks else self.code


@functools.cache
def _data() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("names.toml").read_text(encoding="utf-8"))


def version() -> str:
    """Return the version of Liger-Kernel whose names are listed."""
    return str(_data()["version"])


def dropped() -> dict[str, str]:
    """Return the options without a counterpart, with the reason."""
    return dict(_data()["dropped"])


@functools.cache
def modules() -> frozenset[str]:
    """Return the dotted names of Liger-Kernel's modules."""
    return frozenset({ROOT, *(f"{ROOT}.{name}" for name in _data()["modules"].split())})


@functools.cache
def rows() -> dict[tuple[str, str], NameRow]:
    """Return the row of each package and name, in the order of the file."""
    found = {}
    for section, content in _data()["sections"].items():
        renamed = {option.theirs: option for option in _options(content.get("renamed", ""))}
        for name, entry in content["names"].items():
            fields = {"options": entry} if isinstance(entry, str) else dict(entry)
            here = fields.get("here", content.get("here", ""))
            options = None
            if "options" in fields:
                options = tuple(renamed.get(o.theirs, o) for o in _options(fields["options"]))
            package = content["package"]
            found[package, name] = NameRow(
                section, package, name, here, options,
                tuple(_options(fields.get("call", ""))), fields.get("note", ""),
            )  # fmt: skip
    return found


def _options(text: str) -> Iterable[Option]:
    for item in text.split():
        name, _, value = item.partition(":")
        if name.endswith("!"):
            yield Option(name[:-1], "", "")
            continue
        theirs, renamed, ours = name.partition("=")
        yield Option(theirs, ours if renamed else theirs, value)


def in_section(section: str) -> list[NameRow]:
    """Return the rows of a section, in the order of the file."""
    return [row for row in rows().values() if row.section == section]


def settings() -> dict[str, NameRow]:
    """Return the rows of the settings of programs that use Liger-Kernel, by name."""
    return {row.name: row for row in in_section("settings")}


def find(path: str) -> NameRow | None:
    """Return the row of a dotted name below `liger_kernel`, or of the object that it is part of.

    `liger_kernel.ops.LigerRMSNormFunction.apply` gives the row of LigerRMSNormFunction.
    """
    _, *parts = path.split(".")
    if parts[:2] == ["transformers", "model"]:
        return rows()["transformers.model", "*"]
    packages = {package for package, _ in rows()} - {"settings"}
    package = parts[0] if parts and parts[0] in packages else ""
    for end in range(len(parts), bool(package), -1):
        if row := rows().get((package, parts[end - 1])):
            return row
    return None


def names_of(module: str) -> dict[str, str]:
    """Return the public names that `from module import *` may bind, with their dotted names."""
    package = module.removeprefix(ROOT).lstrip(".").partition(".")[0]
    return {
        name: f"{module}.{name}" for of, name in rows() if of == package and name[:1] not in "_*"
    }


def replacement(row: NameRow, call: ast.Call | None = None) -> Replacement:
    """Return the code that replaces a name, or a call of it with the arguments that it has."""
    remarks = [row.note] if row.note else []
    if len(row.call) > 1:
        remarks.insert(0, f"its forward takes {_arguments(row.call)}")
    if row.options is None or not row.here or call is None:
        return Replacement(row.here, tuple(remarks))
    given, problems = _bind(row.options, call)
    passed: dict[str, str] = {}
    for option in row.options:
        value = given.get(option.theirs)
        if not option.ours:
            if value is not None and _is_on(value) and f"`{option.theirs}`" not in row.note:
                reason = dropped().get(option.theirs, "it has no counterpart")
                problems.append(f"no `{option.theirs}`: {reason}")
            continue
        text = option.value if value is None else ast.unparse(value)
        # Every switch of `fuse` is on by default.
        if not text or (row.here == "liger_ops.fuse" and text == "True"):
            continue
        if passed.setdefault(option.ours, text) != text:
            problems.append(f"`{option.ours}` is one switch here, and two in this call")
    arguments = [f"{name}={value}" for name, value in passed.items() if name != "model"]
    if row.here == "liger_ops.fuse":
        arguments.insert(0, passed["model"])
        if "model" not in given:
            problems.append("call it when the model is made, and not before")
    return Replacement(f"{row.here}({', '.join(arguments)})", (*problems, *remarks))


def _bind(options: tuple[Option, ...], call: ast.Call) -> tuple[dict[str, ast.expr], list[str]]:
    """Return the values of a call by Liger-Kernel's names, and what is wrong with the call."""
    theirs = [option.theirs for option in options if option.theirs]
    given, problems = {}, []
    for position, value in enumerate(call.args):
        if isinstance(value, ast.Starred):
            problems.append(f"`{ast.unparse(value)}` is not read")
            break
        if position >= len(theirs):
            problems.append(f"version {version()} takes {len(theirs)} positional arguments")
            break
        given[theirs[position]] = value
    for keyword in call.keywords:
        if keyword.arg is None:
            problems.append(f"`**{ast.unparse(keyword.value)}` is not read")
        elif keyword.arg in theirs:
            given[keyword.arg] = keyword.value
        else:
            problems.append(f"`{keyword.arg}` is not an option of version {version()}")
    return given, problems


def _is_on(value: ast.expr) -> bool:
    return not (isinstance(value, ast.Constant) and value.value in (False, None))


def _arguments(options: tuple[Option, ...]) -> str:
    return ", ".join(f"{option.ours}={option.theirs}" for option in options if option.ours)


def differences(row: NameRow) -> str:
    """Return a cell of Markdown: the arguments of a row that differ, and its note."""
    texts = []
    if row.options is not None:
        renamed = [o for o in row.options if o.theirs and o.ours not in ("", o.theirs)]
        fixed = [f"`{o.ours}={o.value}`" for o in row.options if o.value]
        without = [f"`{option.theirs}`" for option in row.options if not option.ours]
        without = [name for name in without if name not in row.note]
        texts += [", ".join(f"`{o.theirs}` is `{o.ours}`" for o in renamed)] if renamed else []
        texts += [f"pass {', '.join(fixed)} if not given"] if fixed else []
        texts += [f"no {', '.join(without)}"] if without else []
        if not texts and all(option.ours for option in row.options):
            texts = ["the same arguments"]
    if len(row.call) > 1:
        texts.append(f"forward: `({_arguments(row.call)})`")
    return "; ".join([*texts, row.note] if row.note else texts).replace("|", "\\|")


def markdown(section: str) -> str:
    """Return the table of a section, or of the options that are dropped or renamed for `fuse`."""
    if section == "dropped":
        lines = [f"| `{name}` | {reason} |" for name, reason in dropped().items()]
        return _table("option", "why", lines)
    if section == "switches":
        switches = _options(_data()["sections"]["models"]["renamed"])
        lines = [
            f"| `{o.theirs}` | {f'`{o.ours}`' if o.ours else f'none: {dropped()[o.theirs]}'} |"
            for o in switches
        ]
        return _table("switch of Liger-Kernel", "of `fuse`", lines)
    found = in_section(section)
    if section in ("models", "launchers"):
        call = "(model)" if section == "models" else ""
        lines = [
            f"| `{row.name}` | `{row.here}{call}`{row.note and f'; {row.note}'} |" for row in found
        ]
        return _table("Liger-Kernel", "here", lines)
    lines = [
        f"| `{row.name}` | {f'`{row.here}`' if row.here else 'none'} | {differences(row)} |"
        for row in found
    ]
    return _table("Liger-Kernel", "here", lines, "what differs, and why")


def _table(first: str, second: str, lines: list[str], *more: str) -> str:
    columns = (first, second, *more)
    rule = "|" + "---|" * len(columns)
    return "\n".join([f"| {' | '.join(columns)} |", rule, *lines])
