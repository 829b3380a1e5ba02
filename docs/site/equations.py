"""Equations of docstrings as MathML.

A docstring has its equations as indented lines of plain text, `y = gamma * tanh(alpha * x) + beta`,
which read well in `help()`. The same lines are typeset on a page. A block that is code, or that
does not parse, stays as it is. Browsers show MathML themselves, without a script.
"""

from __future__ import annotations

import re
from html import escape

GREEK_NAMES = "alpha beta gamma delta epsilon lambda mu pi rho sigma tau phi Delta"
GREEK = dict(zip(GREEK_NAMES.split(), "αβγδελμπρστφΔ", strict=True))
SIGNS = {
    "*": "⋅", "@": "", ".": "⋅", "<=": "≤", ">=": "≥", "!=": "≠", "==": "=", "-": "−", "...": "…",
}  # fmt: skip
SUMS = {"sum": "∑"}
# Letters that are indices behind the name of a tensor: lse_i, x_ic, weight_c; not gate_up.
INDEX = re.compile(r"[ijkctelrvnwabHV]|[ijctelr]{2,3}")
TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d+)?(?:e-?\d+)?)"
    # x_i,target_i has two indices, and "response's" is a word.
    r"|(?P<name>[A-Za-z]\w*(?:(?<=_\w)(?:,[A-Za-z]\w*)+|'s\b)?)(?P<prime>'?)"
    r"|(?P<sign>\.\.\.|\*\*|<=|>=|!=|==|\.T\b|[-+*/@^=<>|,;:.()\[\]]))"
)
# What no equation has: attributes, keyword arguments, strings, comments, and words of Python.
CODE = re.compile(
    r"""^ *\S.*?["#].*=|[(\[{,] *"|#|\b(?:liger_ops|torch)\.|\w\.(?!T\b)[a-z]\w|\w=\w"""
    r"""|[(,] *\*\*\w|^\s*with """,
    re.MULTILINE,
)
# Words of a phrase, which is no product: "the mean over the pairs of".
WORD = re.compile(rf"(?!(?:log|min|max|exp|clip|nll|{'|'.join(GREEK)})$)[a-z]{{2,}}(?:'s)?")
ENGLISH = frozenset(
    (
        "all",
        "and",
        "are",
        "as",
        "at",
        "by",
        "each",
        "for",
        "if",
        "in",
        "is",
        "it",
        "of",
        "on",
        "one",
    )
    + ("or", "over", "that", "the", "they", "to", "where", "with", "without")
)
PRECEDENCE = {
    ",": 1, ";": 1, ":": 1, "=": 2, "<": 3, ">": 3, "<=": 3, ">=": 3, "!=": 3, "==": 3,
    "+": 4, "-": 4, "*": 6, "/": 6, "@": 6, ".": 6,
}  # fmt: skip
# Factors that stand beside each other.
NEXT_TO = 6


class NotAnEquation(ValueError):
    pass


def as_mathml(block: str) -> str | None:
    """Return the lines of a block as one table of MathML, None if they are no equations."""
    if CODE.search(block):
        return None
    try:
        rows = [_cells(line) for line in block.splitlines() if line.strip()]
    except NotAnEquation:
        return None
    if "=" not in block and "..." in block:
        # A call, with arguments that are left out.
        return None
    if 2 * sum("<mrow>" in "".join(row) for row in rows) < len(rows):
        return None
    # A column in which no row has anything would still take its margins.
    used = [any(row[column] for row in rows) for column in range(4)]
    kinds = ("left", "sign", "right", "remark")
    table = "".join(
        "<mtr>"
        + "".join(
            f'<mtd class="{kind}">{cell}</mtd>'
            for kind, cell, is_used in zip(kinds, row, used, strict=True)
            if is_used
        )
        + "</mtr>"
        for row in rows
    )
    return f'<math display="block"><mtable displaystyle="true">{table}</mtable></math>'


def _cells(line: str) -> tuple[str, str, str, str]:
    """Divide a line into what is left of its relation, the relation, what is right, and a remark.

    Columns of a line stand at least two spaces apart.
    """
    left, *columns = re.split(r"\s{2,}", re.sub(r"\s+= +", " = ", line.strip()))
    label, colon, rest = left.partition(": ")
    if colon and re.fullmatch(r"[\w, ]+", label):
        left, columns = label, [rest, *columns]
    if " = " in f" {left}" and not re.match(r"\w+:?$", left):
        equation, condition = _divided(left)
        name, _, value = f" {equation}".partition(" = ")
        remarks = [*([condition] if condition else []), *columns]
        name = _math(name) if name.strip() else ""
        return name, "<mo>=</mo>", _math(value), _remark("; ".join(remarks))
    if not columns:
        equation, condition = _divided(left)
        return "", "", _math(equation), _remark(condition)
    # A table: a name, its equation, and perhaps a remark.
    equation, condition = _divided(columns[0])
    remarks = [*([condition] if condition else []), *columns[1:]]
    return _text(left.rstrip(":")), "", _math_or_text(equation), _remark("; ".join(remarks))


def _divided(line: str) -> tuple[str, str]:
    """Divide "y = 0 where j > i" into an equation and a condition, which begins with its word."""
    depth = 0
    for found in re.finditer(
        r"[(\[]|[)\]]|(,? )(?=(?:with|without|where|if|for|or) )|, (?=or$)|; ", line
    ):
        if found.group() in "([":
            depth += 1
        elif found.group() in ")]":
            depth -= 1
        elif depth == 0:
            return line[: found.start()], line[found.end() :]
    return line, ""


def _remark(text: str) -> str:
    """Typeset a remark: a condition behind its word, "or" another value, or text."""
    word, _, rest = text.partition(" ")
    if word in ("where", "with", "if", "or", "and") and rest:
        equation, condition = _divided(rest)
        more = f"{_text(' ')}{_remark(condition)}" if condition else ""
        return f"{_text(f'{word} ')}{_math_or_text(equation)}{more}"
    return _math_or_text(text) if re.search(r" [=<>*] ", text) else _text(text)


def _text(text: str) -> str:
    # Spaces at the ends of a token of MathML are dropped.
    return f"<mtext>{escape(text).replace(' ', '&nbsp;')}</mtext>" if text else ""


def _math_or_text(text: str) -> str:
    try:
        return _math(text)
    except NotAnEquation:
        return _text(text)


def _math(text: str) -> str:
    parser = _Parser(text)
    mathml = parser.expression(0)
    if parser.token is not None:
        raise NotAnEquation(text)
    return f"<mrow>{mathml}</mrow>"


class _Parser:
    """A parser by precedence, whose result is MathML. Factors may stand beside each other."""

    def __init__(self, text: str) -> None:
        self.text, self.at, self.bars = text.strip(), 0, 0
        self.advance()

    def advance(self) -> None:
        self.begin = self.at
        if self.at >= len(self.text):
            self.token, self.kind = None, ""
            return
        found = TOKEN.match(self.text, self.at)
        if found is None:
            raise NotAnEquation(self.text[self.at :])
        self.at, self.kind = found.end(), found.lastgroup or ""
        if found["name"]:
            self.kind = "name"
            self.token: str | None = found["name"] + found["prime"]
        else:
            self.token = found[self.kind]

    def expect(self, token: str) -> None:
        if self.token != token:
            raise NotAnEquation(self.text)
        self.advance()

    def expression(self, lowest: int) -> str:
        left = self.prefix(lowest)
        while self.token is not None and not self._closes():
            if self.token in PRECEDENCE:
                precedence = PRECEDENCE[self.token]
            elif self.token == "|" or self.begins_phrase():
                precedence = 1
            else:
                precedence = NEXT_TO
            if precedence < lowest:
                break
            left = self.infix(left, precedence)
        return left

    def _closes(self) -> bool:
        return self.token in (")", "]") or (self.token == "|" and self.bars > 0)

    def begins_phrase(self) -> bool:
        """Return whether words in English begin here."""
        if (
            self.kind != "name"
            or self.token == "sum"
            and re.match(r" over \w of ", self.text[self.at :])
        ):
            return False
        follows = re.match(r"\s+([A-Za-z]\w*(?:'s)?)(?!\()", self.text[self.at :])
        is_word = WORD.fullmatch(self.token or "") and not self.text[self.at :].startswith("(")
        next_is_word = follows is not None and (follows[1] in ENGLISH or WORD.fullmatch(follows[1]))
        return self.token in ENGLISH or bool(next_is_word and (is_word or follows[1] in ENGLISH))

    def phrase(self, before: str) -> str:
        words = [self.token or ""]
        goes_on = True
        while goes_on:
            self.advance()
            is_word = self.kind == "name" and (
                self.begins_phrase() or WORD.fullmatch(self.token or "")
            )
            goes_on = bool(is_word) and not self.text[self.at :].startswith("(")
            if goes_on:
                words.append(self.token or "")
        text = _text(f"{before}{' '.join(words)} ")
        if (
            self.token is None
            or self._closes()
            or self.token in PRECEDENCE
            and self.token not in "+-"
        ):
            return text
        return f"{text}{self.expression(2)}"

    def infix(self, left: str, precedence: int) -> str:
        if self.begins_phrase():
            return f"{left}{self.phrase(' ')}"
        sign = self.token
        if sign in PRECEDENCE or sign == "|":
            self.advance()
            right = self.expression(precedence + 1)
            if sign == "/":
                return f"<mfrac><mrow>{_bare(left)}</mrow><mrow>{_bare(right)}</mrow></mfrac>"
            if sign in (",", ";"):
                return f'{left}<mo separator="true">{sign}</mo><mspace width="0.2em"/>{right}'
            if sign == "|":
                return f'{left}<mo lspace="0.15em" rspace="0.15em">|</mo>{right}'
            if sign == "@":
                return f'{left}<mspace width="0.25em"/>{right}'
            return f"{left}{_sign(sign)}{right}"
        right = self.expression(precedence + 1)
        if re.search(r"<mi>[a-z_]{4,}</mi>$", left) or re.match(r"<mi>[a-z_]{4,}</mi>(?!<)", right):
            # A word in English between two factors is no factor.
            raise NotAnEquation(self.text)
        return f'{left}<mspace width="0.2em"/>{right}'

    def prefix(self, lowest: int) -> str:
        if self.begins_phrase():
            return self.phrase("")
        if self.token in ("-", "+"):
            sign = self.token
            self.advance()
            return f'<mo form="prefix">{SIGNS.get(sign, sign)}</mo>{self.expression(5)}'
        return self.postfix(self.atom())

    def postfix(self, value: str) -> str:
        while True:
            if self.token in ("**", "^"):
                self.advance()
                power = _bare(self.prefix(7))
                value = f"<msup><mrow>{value}</mrow><mrow>{power}</mrow></msup>"
            elif self.token == ".T":
                self.advance()
                value = f'<msup><mrow>{value}</mrow><mi mathvariant="normal">T</mi></msup>'
            elif self.token == "[" and not self.text[self.begin : self.begin + 1].isspace():
                self.advance()
                index = self.expression(0)
                self.expect("]")
                value = _indexed(value, index)
            else:
                return value

    def atom(self) -> str:
        token, kind = self.token, self.kind
        if token is None:
            raise NotAnEquation(self.text)
        self.advance()
        if kind == "number":
            return f"<mn>{token}</mn>"
        if kind == "name":
            return self.named(token)
        if token == "(":
            return self.parenthesised()
        if token == "|":
            self.bars += 1
            inner = self.expression(0)
            self.bars -= 1
            self.expect("|")
            return f"<mrow><mo>|</mo>{inner}<mo>|</mo></mrow>"
        if token == "...":
            return "<mo>…</mo>"
        raise NotAnEquation(self.text)

    def parenthesised(self) -> str:
        if self.token == ")":
            self.advance()
            return "<mrow><mo>(</mo><mo>)</mo></mrow>"
        bars, self.bars = self.bars, 0
        inner = self.expression(0)
        self.bars = bars
        self.expect(")")
        return f"<mrow><mo>(</mo>{inner}<mo>)</mo></mrow>"

    def named(self, name: str) -> str:
        base, _, index = name.partition("_")
        calls = self.token == "(" and not self.text[self.begin : self.begin + 1].isspace()
        if name == "sum" and self.token == "over":
            return self.sum_over()
        if base in SUMS and (index or (calls and "," not in self._argument())):
            sign = f'<mo largeop="true" movablelimits="false">{SUMS[base]}</mo>'
            # The sum is of one factor here; products are read from the left.
            term = self.prefix(PRECEDENCE["*"] + 1)
            return (
                f"<mrow>{f'<munder>{sign}{_index(index)}</munder>' if index else sign}{term}</mrow>"
            )
        if name == "sqrt" and calls:
            return f"<msqrt>{_bare(self.atom())}</msqrt>"
        value = _name(name)
        return f'{value}<mspace width="0.05em"/>{self.atom()}' if calls else value

    def sum_over(self) -> str:
        """Read "sum over i of": the sum over an index, before its term."""
        self.advance()
        index = self.token or ""
        self.advance()
        self.expect("of")
        sign = '<mo largeop="true" movablelimits="false">∑</mo>'
        term = self.expression(PRECEDENCE["*"])
        return f"<munder>{sign}{_word(index)}</munder>{term}"

    def _argument(self) -> str:
        """Return the text of the parentheses that open here."""
        depth, begin = 0, self.begin
        for end in range(begin, len(self.text)):
            depth += (self.text[end] in "([") - (self.text[end] in ")]")
            if depth == 0 and self.text[end] == ")":
                inner = self.text[begin + 1 : end]
                return re.sub(r"\([^()]*\)|\[[^][]*\]", "", re.sub(r"\([^()]*\)", "", inner))
        raise NotAnEquation(self.text)


def _sign(sign: str | None) -> str:
    if sign == "*":
        return '<mo lspace="0.15em" rspace="0.15em">⋅</mo>'
    return f"<mo>{escape(SIGNS.get(sign or '', sign or ''))}</mo>"


def _name(name: str) -> str:
    prime = "<mo>′</mo>" * name.endswith("'")
    name, *others = name.rstrip("'").split(",")
    base, _, index = name.rpartition("_")
    # b_pre and log_prob_i; the name of an argument, such as log_prob, stays a word.
    if base and (INDEX.fullmatch(index) or len(base) == 1 or base in GREEK):
        value = _indexed(_name(base), ",".join([_index(index), *map(_name, others)]))
    else:
        value = _word(name)
    return f"<msup>{value}{prime}</msup>" if prime else value


def _indexed(value: str, index: str) -> str:
    """Add an index to a name, or to the indices that it has."""
    index = index.replace("</mi>,<", '</mi><mo separator="true">,</mo><')
    inner = re.fullmatch(r"<msub>(<mi>\w+</mi>)<mrow>(.*)</mrow></msub>", value)
    if inner is not None and "<msub>" not in inner[2]:
        return f'<msub>{inner[1]}<mrow>{inner[2]}<mo separator="true">,</mo>{index}</mrow></msub>'
    return (
        f"<msub><mrow>{value}</mrow><mrow>{index}</mrow></msub>"
        if value[:4] != "<mi>"
        else (f"<msub>{value}<mrow>{index}</mrow></msub>")
    )


def _index(text: str) -> str:
    if text in GREEK or len(text) == 1:
        return _word(text)
    if INDEX.fullmatch(text):
        return f"<mrow>{''.join(_word(letter) for letter in text)}</mrow>"
    return _word(text)


def _word(text: str) -> str:
    if text in GREEK:
        return f"<mi>{GREEK[text]}</mi>"
    return f"<mi>{escape(text)}</mi>"


def _bare(mathml: str) -> str:
    """Remove the parentheses around all of a numerator, an exponent or a radicand."""
    inner = re.fullmatch(r"<mrow><mo>\(</mo>(.*)<mo>\)</mo></mrow>", mathml)
    if inner is None:
        return mathml
    depth = 0
    for sign in re.findall(r"<mo>([()])</mo>", inner[1]):
        depth += 1 if sign == "(" else -1
        if depth < 0:
            return mathml
    return inner[1]
