"""The site says what the docstrings and documents say: equations, bars, pages and links.

`make docs` builds the site, and fails for a link or an anchor that leads nowhere.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import math
import re
import sys
import textwrap
from collections.abc import Iterator
from xml.etree import ElementTree

import pytest

from sources import ROOT

sys.path.insert(0, str(ROOT / "docs/site"))

import charts
import equations
import public

# What docstrings.py reads a block by; it needs the extra docs.
BLOCK = re.compile(r"(?:^ {4}.*\n(?:\n+(?= {4}))?)+", re.MULTILINE)
HEAD = re.compile(r"^(?:Args|Attributes|Shape|Returns|Raises|Source|Example):", re.MULTILINE)


@functools.cache
def blocks() -> list[str]:
    """Return the indented blocks of all public docstrings, before their sections."""
    docs = [HEAD.split(inspect.getdoc(value) or "")[0] for value in public.OBJECTS.values()]
    return sorted({block for doc in docs for block in BLOCK.findall(f"{doc.rstrip()}\n")})


def equal_sides(block: str) -> Iterator[tuple[str, str]]:
    """Yield each right-hand side that Python can read, and that of the block's MathML."""
    mathml = equations.as_mathml(block)
    if mathml is None:
        return
    rows = ElementTree.fromstring(mathml.replace("&nbsp;", " "))[0]
    for line, row in zip([x for x in block.splitlines() if x.strip()], rows, strict=True):
        column = next((cell for cell in row if cell.get("class") == "right"), None)
        sides = re.split(r"\s=\s+", re.split(r"(?<=\S)\s{2,}(?!=)", line.strip())[0], maxsplit=1)
        # x_i,target_i has two indices.
        written = re.sub(r"(?<=_\w),(?=[A-Za-z])", "", sides[-1])
        if column is not None and len(sides) == 2 and is_python(written):
            yield written, as_python(column)


def is_python(text: str) -> bool:
    try:
        return not isinstance(ast.parse(text, mode="eval").body, ast.Tuple)
    except SyntaxError:
        return False


def as_python(element: ElementTree.Element) -> str:
    """Write MathML as Python: what stands within one element is in parentheses."""
    children = [as_python(child) for child in element]
    if element.tag == "mfrac":
        return f"(({children[0]})/({children[1]}))"
    if element.tag == "msqrt":
        return f"sqrt({''.join(children)})"
    if element.tag == "msup":
        transposed = children[1] == "T"
        return f"({children[0]}).T" if transposed else f"(({children[0]})**({children[1]}))"
    if element.tag == "msub":
        return f"{children[0]}[{children[1]!r}]"
    if element.tag == "mspace":
        # A thin space is between factors, and the thinnest between a function and its arguments.
        return {"0.25em": "*", "0.2em": "", "0.05em": ""}[element.get("width", "")]
    signs = {v: k for k, v in equations.SIGNS.items() if k not in ("@", ".")} | {"∑": "sum"}
    letters = {letter: name for name, letter in equations.GREEK.items()}
    text = (element.text or "").strip()
    return signs.get(text, letters.get(text, text)) + "".join(children)


def value(text: str) -> complex:
    """Evaluate an expression at numbers that its names give; functions are arbitrary, but fixed."""

    def number(name: str) -> float:
        letters = re.sub(r"\W|_", "", name)
        return 0.5 + int(hashlib.sha256(letters.encode()).hexdigest()[:8], 16) / 2**32

    def of(node: ast.AST) -> complex:
        match node:
            case ast.Constant():
                return (
                    node.value if isinstance(node.value, (int, float)) else number(str(node.value))
                )
            case ast.Name():
                return number(node.id)
            case ast.Attribute():
                return of(node.value) + 0.25
            case ast.Subscript():
                return number(ast.unparse(node))
            case ast.UnaryOp():
                return -of(node.operand)
            case ast.Call():
                total = sum((i + 1) * of(argument) for i, argument in enumerate(node.args))
                return (
                    total**0.5
                    if ast.unparse(node.func) == "sqrt"
                    else (number(ast.unparse(node.func)) * total + 0.125)
                )
            case ast.Compare():
                return of(node.left) - 2 * of(node.comparators[0])
            case ast.BinOp():
                left, right = of(node.left), of(node.right)
                if isinstance(node.op, ast.Div):
                    return left / right
                if isinstance(node.op, ast.Pow):
                    return left**right
                if isinstance(node.op, (ast.Mult, ast.MatMult)):
                    return left * right
                return left + right if isinstance(node.op, ast.Add) else left - right
        raise AssertionError(f"{ast.unparse(node)} of {text}")

    return of(ast.parse(text, mode="eval").body)


def test_typeset_equations_have_the_values_of_the_docstrings() -> None:
    sides = [pair for block in blocks() for pair in equal_sides(block)]
    wrong = [
        (written, typeset)
        for written, typeset in sides
        if not math.isclose(abs(value(written)), abs(value(typeset)), rel_tol=1e-9)
    ]
    assert len(sides) >= 40 and not wrong, wrong


def test_another_equation_has_another_value() -> None:
    """The comparison sees a wrong fraction, exponent and sign."""
    texts = "a / b * c", "a / (b * c)", "a - b + c", "a - (b + c)", "a**2 * b", "(a * b)**2"
    assert len({round(abs(value(text)), 9) for text in texts}) == len(texts)


@pytest.mark.parametrize(
    "block",
    [
        '    step = torch.compile(model, backend="liger")',
        "    y = f(x, dim=1)",
        "    with liger_ops.enable():\n        model(x)",
        "    log_prob = log_prob.new_zeros(counts.shape)",
        "    rope(q, k, ...)",
        "    y = x +",
        "    p_k / sum(p_k) against q_k",
    ],
)
def test_what_is_no_equation_stays_text(block: str) -> None:
    assert equations.as_mathml(block) is None


def test_a_sum_below_a_line_is_one_divisor() -> None:
    mathml = equations.as_mathml("    y = sum_i w_i * x_i / sum_i w_i") or ""
    divisor = ElementTree.fromstring(mathml).find(".//mfrac/mrow[2]")
    assert "".join(divisor.itertext()) == "∑iwi"  # type: ignore[union-attr]


def test_most_equations_are_typeset() -> None:
    typeset = [block for block in blocks() if equations.as_mathml(block) is not None]
    assert len(typeset) >= 0.75 * len(blocks()) > 50


TABLE = """\
| | ms a step | peak GiB |
|---|---|---|
| `torch.compile` | 200.0 (190.0 to 210.0) | 31.5 |
| `backend="liger"` | 100.0 | 27.2 |
"""


def test_bars_are_as_long_as_the_numbers() -> None:
    chart = charts.chart(TABLE)
    long, short = (float(width) for width in re.findall(r'class="bar[^>]*width:([\d.]+)%', chart))
    assert math.isclose(long, 2 * short, abs_tol=0.02)
    begin, width = map(float, re.findall(r"left:([\d.]+)%;width:([\d.]+)%", chart)[0])
    assert math.isclose(begin / long, 0.95, abs_tol=1e-3)
    assert math.isclose(width / long, 0.1, abs_tol=1e-3)
    assert re.findall(r"<b[^>]*>(.*?)</b>", chart) == ["200.0 ms", "100.0 ms"]
    assert [" ours" in bar for bar in re.findall(r'<i class="bar[^"]*"', chart)] == [False, True]
    assert charts.with_charts(f"text\n\n{TABLE}\n").startswith("text\n\n<div")


@pytest.mark.parametrize("other", ["seconds", "ms, forward"])
def test_other_tables_have_no_bars(other: str) -> None:
    assert charts.chart(TABLE.replace("ms a step", other)) == ""
    assert charts.chart(TABLE.replace("100.0", "failed")) == ""


def test_every_public_name_has_a_page() -> None:
    pages = public.pages()
    described = [name for page in pages for name in page.names]
    assert set(public.OBJECTS) - {"liger_ops.fusion.Finding"} <= set(described)
    assert len({page.path for page in pages}) == len(pages)
    assert {f"reference/ops/{op}.md" for op in ("rms_norm", "linear_top_k")} <= {
        page.path for page in pages
    }


def test_a_docstring_is_markdown() -> None:
    pytest.importorskip("griffe", reason="the extra docs is not installed here")
    import docstrings

    text = textwrap.dedent(
        """\
        Norm of `rms_norm`, x**2 <= 1.

            y = x / n

        Args:
            a, b: one [of] two.

        Returns:
            FuseReport: it.

        Example:
            >>> a * b
        """
    )
    parts = docstrings.markdown(text).split("\n\n")
    assert parts[0] == r"Norm of [`rms_norm`][liger_ops.rms_norm], x\*\*2 \<= 1."
    assert parts[1].startswith('<div class="equations"><math')
    assert parts[2] == "Args:\n    a: one \\[of] two.\n    b: one \\[of] two."
    assert parts[3:] == ["**Returns:** FuseReport: it.", "Examples:\n    >>> a * b"]


def test_links_of_documents_lead_to_pages_or_to_the_repository() -> None:
    pytest.importorskip("mkdocs", reason="the extra docs is not installed here")
    import hooks
    from mkdocs.structure.files import File, Files

    files = Files([File(path, "docs", "site", True) for path in ("index.md", "fuse.md")])
    repository = hooks.URLS["Repository"]
    assert hooks.target("docs/fuse.md", "README.md", "index.md", files) == "fuse.md"
    assert hooks.target("../README.md", "docs/fuse.md", "fuse.md", files) == "index.md"
    assert (
        hooks.target("LICENSE", "README.md", "index.md", files) == f"{repository}/blob/main/LICENSE"
    )
    text = "[`f`](docs/fuse.md#a) and `[x](y)` and [z](https://z)"
    found = [m["path"] for m in hooks.LINK_OR_CODE.finditer(text) if m["link"]]
    assert found == ["docs/fuse.md"]
