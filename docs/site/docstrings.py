"""Docstrings as Markdown, for the pages of the reference.

griffe reads the sources. What they do not have, signatures and docstrings that are completed when
the package is imported, comes from the imported package.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from pymdownx import slugs

sys.path.insert(0, str(Path(__file__).parent))

from equations import as_mathml
from public import OBJECTS, ROOT

SECTION = re.compile(r"^(Args|Attributes|Shape|Returns|Raises|Source|Example):(?=\s)", re.MULTILINE)
BLOCK = re.compile(r"(?:^ {4}.*\n(?:\n+(?= {4}))?)+", re.MULTILINE)
ENTRY = re.compile(r"^ {4}(\w+(?:,\s+\w+)*): (.*(?:\n {8}.*)*)", re.MULTILINE)
CODE = re.compile(r"(`[^`]+`)")
DOCUMENT = re.compile(r"`?(docs/[\w/-]+\.md)`?")
slugify = slugs.slugify(case="lower")


class PublicDocstrings(griffe.Extension):
    """Give griffe's objects the docstrings and signatures of the imported ones, as Markdown."""

    def on_package(self, *, pkg: griffe.Module, loader: Any, **kwargs: Any) -> None:
        for value in OBJECTS.values():
            path = f"{value.__module__}.{value.__qualname__}".removeprefix("liger_ops.")
            described = pkg[path]
            described.docstring = self._docstring(described, inspect.getdoc(value) or "")
            self._sign(described, value)
            if inspect.isclass(value):
                self._translate(described)
        for module in pkg["integrations"].modules.values():
            module.docstring = module.docstring and self._docstring(module, module.docstring.value)
            self._translate(module)

    def _translate(self, owner: griffe.Object) -> None:
        for member in owner.members.values():
            if not member.is_alias and member.docstring:
                member.docstring = self._docstring(member, member.docstring.value)

    def _docstring(self, parent: griffe.Object, text: str) -> griffe.Docstring:
        return griffe.Docstring(markdown(text), lineno=parent.lineno, parent=parent)

    def _sign(self, described: griffe.Object, value: Any) -> None:
        try:
            signature = inspect.signature(value)
        except (TypeError, ValueError):
            return
        parameters = griffe.Parameters(*map(_parameter, signature.parameters.values()))
        if described.is_class:
            init = griffe.Function("__init__", parameters=parameters)
            described.set_member("__init__", init)
        else:
            described.parameters = parameters
            returned = signature.return_annotation
            described.returns = (
                None if returned is inspect.Signature.empty else _annotation(returned)
            )


def _parameter(parameter: inspect.Parameter) -> griffe.Parameter:
    has_default = parameter.default is not inspect.Parameter.empty
    return griffe.Parameter(
        parameter.name,
        kind=getattr(griffe.ParameterKind, parameter.kind.name.lower()),
        annotation=None
        if parameter.annotation is inspect.Parameter.empty
        else _annotation(parameter.annotation),
        default=repr(parameter.default) if has_default else None,
    )


def _annotation(annotation: Any) -> str:
    annotation = getattr(annotation, "__forward_arg__", annotation)
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:torch|typing|collections\.abc|liger_ops(?:\.\w+)*)\.(?=[A-Z])", "", text)


def markdown(docstring: str) -> str:
    """Return a docstring, with its sections, as griffe and Markdown read it."""
    text, *parts = SECTION.split(inspect.cleandoc(docstring))
    written = [prose(text)]
    for title, body in zip(parts[::2], parts[1::2], strict=True):
        if title == "Source":
            written.append(f"**Source:** {escaped(' '.join(body.split()))}")
        elif title == "Example":
            written.append(f"Examples:\n{body.strip(chr(10))}".replace("  # doctest: +SKIP", ""))
        elif title in ("Args", "Attributes"):
            listed = "\n".join(f"    {name}: {about}" for name, about in entries(body))
            written.append(f"{title}:\n{listed}")
        elif title == "Shape":
            listed = "\n".join(f"- `{name}`: {about}" for name, about in entries(body))
            written.append(f"**Arguments of `forward`:**\n\n{listed}")
        elif title == "Returns":
            written.append(f"**Returns:** {escaped(' '.join(body.split()))}")
        else:
            written.append(f"{title}:\n{escaped(body.strip(chr(10)))}")
    return "\n\n".join(part.strip("\n") for part in written)


def entries(body: str) -> Iterator[tuple[str, str]]:
    """Yield each name of a section, with its description in one line; some names share one."""
    for names, about in ENTRY.findall(body):
        for name in re.split(r",\s+", names):
            yield name, escaped(" ".join(about.split()))


def prose(text: str) -> str:
    """Return text whose indented blocks are equations, or code."""
    parts, at = [], 0
    text = f"{text.rstrip()}\n"
    for block in BLOCK.finditer(text):
        parts += [escaped(text[at : block.start()]), typeset(block.group())]
        at = block.end()
    return "".join([*parts, escaped(text[at:])])


def typeset(block: str) -> str:
    mathml = as_mathml(block)
    if mathml is not None:
        return f'<div class="equations">{mathml}</div>\n\n'
    code = inspect.cleandoc(f"\n{block}")
    is_python = (
        re.search(r"\w\(.*\)|^with |^import |^from ", code, re.M) and "  " not in code.strip()
    )
    return f"```{'python' if is_python else 'text'}\n{code}\n```\n\n"


def escaped(text: str) -> str:
    """Escape what Markdown would read as markup outside of code, and link names and documents."""
    return "".join(
        linked(part) if part.startswith("`") else re.sub(r"(?<!^)(?<!\n)\*|[<\[]", r"\\\g<0>", part)
        for part in CODE.split(DOCUMENT.sub(r"`\1`", text))
    )


def linked(code: str) -> str:
    name = code.strip("`")
    for full in (name, f"liger_ops.{name}"):
        if full in OBJECTS:
            return f"[{code}][{full}]"
    if DOCUMENT.fullmatch(code):
        title = re.search(r"^# (.*)$", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE)
        assert title is not None, f"{name} has no title"
        # Headings are found by their anchors, on any page.
        return f"[{title[1]}][{slugify(title[1], '-')}]"
    return code
