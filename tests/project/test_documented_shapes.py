"""The shapes in an op's documentation are those of its line."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

from liger_ops import library
from liger_ops.axes import Line, TensorSpec, lines
from liger_ops.meta.lines import EXCEPTIONS

pytestmark = pytest.mark.quick

FORWARDS = [
    name
    for name, op in library.OPS.items()
    if op.axes and op.fake.__module__ == "liger_ops.meta.lines"
]
SHAPE = r"\([^()]*\)"
WORDS = {"any shape": "(...)", "a tensor of one element": "one element"}


def documented(name: str, section: str) -> str:
    """A section of the documentation of an op, and of the public op that calls it."""
    functions = [library.OPS[name].definition, library.COMPOSED.get(name.removesuffix("_forward"))]
    docs = [inspect.cleandoc(function.__doc__) for function in functions if function is not None]
    found = [re.search(rf"^{section}:\n((?:    .*\n|\n)+)", doc, re.M) for doc in docs]
    return "".join(match[1] for match in found if match)


def shapes_in(text: str, own: str) -> dict[str, str]:
    """Argument -> its shape in the documentation, or the argument or op that has the shape."""
    found: dict[str, str] = {}
    for names, description in re.findall(r"^    (\w+(?:,\s+\w+)*):\s+((?:.|\n     )+)", text, re.M):
        shapes = re.match(rf"{SHAPE}(?:(?:, | and ){SHAPE})*", description)
        given = re.findall(SHAPE, shapes[0]) if shapes else []
        given += re.findall(r"of (?:the same|(\w+)'s) shape", description)
        given += [shape for words, shape in WORDS.items() if words in description]
        given += [op for op in re.findall(r"as (?:for|in) `(\w+)`", description) if op != own]
        for i, name in enumerate(re.split(r",\s+", names)):
            if given:
                found.setdefault(name, given[min(i, len(given) - 1)])
    return found


def form(entry: TensorSpec) -> str:
    axes = entry.axes if entry.reduced is None else entry.reduced
    return "one element" if axes == ("1",) else entry._replace(axes=axes).shape_text


def disagreements(name: str, forms: tuple[Line, ...], arguments: str, returns: str) -> list[str]:
    shapes = shapes_in(arguments, name.removesuffix("_forward"))
    named = {n: entry for line in forms for n, entry in line.arguments.items()}
    first = next(iter(forms[-1].arguments))
    exceptions = EXCEPTIONS.get(name.removesuffix("_forward"))
    wrong = []
    for argument, entry in named.items():
        if exceptions is not None and argument in exceptions.shapes:
            continue
        said = shapes.get(argument, "nothing")
        if said in ("", *named):
            said = form(named[said or first])
        if f"{said}_forward" in FORWARDS:
            said = form(lines(str(library.OPS[f"{said}_forward"].axes))[-1].arguments[argument])
        # A packed tensor is documented after the tensors of the form without it.
        accepted = {form(line.arguments[argument]) for line in forms if argument in line.arguments}
        if said.lower() not in {text.lower() for text in accepted}:
            wrong.append(f"{argument}: {said}, but {form(entry)}")
    results = {form(entry).lower() for line in forms for entry in line.results.values()}
    said = re.match(rf"    ({SHAPE})", returns)
    if said and said[1].lower() not in results:
        wrong.append(f"the result: {said[1]}, but {results}")
    return wrong


@pytest.mark.parametrize("name", FORWARDS)
def test_documented_shapes_are_the_lines(name: str) -> None:
    forms = lines(str(library.OPS[name].axes))
    sections: Any = (documented(name, "Args"), documented(name, "Returns"))
    assert disagreements(name, forms, *sections) == []


def test_another_shape_is_noticed() -> None:
    forms = lines("x=* N, weight=N -> y=* N")
    args = "    x: (..., N), floating point.\n    weight: (M,), floating point.\n"
    assert disagreements("op", forms, args, "    (N,)\n") == [
        "weight: (M,), but (N,)", "the result: (N,), but {'(..., n)'}"
    ]  # fmt: skip
