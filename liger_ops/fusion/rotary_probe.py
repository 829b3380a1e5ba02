"""Which rope a function computes, found by comparing what it makes of chosen tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import library
from .probing import NotAnOp, dtype_name, first_line, uniform

# The sizes of a probe. No two are equal, so that a table cannot meet a wrong dimension.
BATCH, HEADS, K_HEADS, SEQUENCE, WIDTH = 2, 6, 3, 5, 12

# How the width of the tables may stand to that of a head: equal, a half, or any other.
TABLE_WIDTHS = {"whole": WIDTH, "half": WIDTH // 2, "part": 8}

# Where queries have heads and positions, and how the op sees them: (B, heads, S, D).
LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "bhsd": (lambda x: x, lambda x: x),
    "bshd": (lambda x: x.transpose(1, 2), lambda x: x.transpose(1, 2)),
    "shd": (lambda x: x.transpose(0, 1).unsqueeze(0), lambda x: x.squeeze(0).transpose(0, 1)),
}

# Of float32 against the definition: two products and a sum of numbers of order 1.
FLOAT32_BOUND = 1e-6


@dataclass(frozen=True)
class Form:
    """A form of call that is rope, and the op's options in it.

    half_tables: of each row of the tables the first half is all that is used.
    """

    unsqueeze_dim: int | None
    layout: str
    table_width: str
    half_tables: bool
    options: tuple[tuple[str, Any], ...]

    def tables(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        if self.half_tables:
            half = cos.shape[-1] // 2
            return cos[..., :half], sin[..., :half]
        return cos, sin

    def fits(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
        """Whether tensors have the layout and widths of this form, and no size is broadcast but
        that of a batch."""
        rank = len(self.layout)
        if (q.dim(), k.dim(), cos.dim(), sin.dim()) != (rank, rank, rank - 1, rank - 1):
            return False
        if q.dtype is not k.dtype or cos.dtype is not sin.dtype:
            return False
        D, R = q.shape[-1], cos.shape[-1]
        if self.table_width != ("whole" if R == D else "half" if 2 * R == D else "part"):
            return False
        positions = self.layout.index("s")
        S = q.shape[positions]
        if k.shape[positions] != S or cos.shape[-2] != S or k.shape[-1] != D:
            return False
        if cos.shape != sin.shape or R > D or R % 2 or (self.half_tables and R % 4):
            return False
        if "b" not in self.layout:
            return True
        B = q.shape[0]
        return k.shape[0] == B and (cos.shape[0] == 1 or cos.shape[0] == B)

    def __call__(
        self, op: Callable[..., Any], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        inward, outward = LAYOUTS[self.layout]
        q, k = op(inward(q), inward(k), *self.tables(cos, sin), **dict(self.options))
        return outward(q), outward(k)


@dataclass(frozen=True)
class Rotary:
    """What a function of (q, k, cos, sin, ...) computes.

    wide_tables: whether beside queries of another dtype it takes tables of float32, and returns
    the queries' dtype.
    """

    name: str
    parameters: tuple[str, ...]
    unsqueeze_dim: int | None
    wide_tables: bool
    forms: tuple[Form, ...]

    def form_of(self, given: dict[str, Any]) -> Form | None:
        """The form of a call with these arguments, None where it is not rope."""
        names = self.parameters[:4]
        for name, value in given.items():
            if name not in names and name != "unsqueeze_dim" and value is not None:
                return None
        for name in names:
            if not isinstance(given.get(name), Tensor):
                return None
        q, k, cos, sin = (given[name] for name in names)
        unsqueeze_dim = given.get("unsqueeze_dim", self.unsqueeze_dim)
        for form in self.forms:
            if form.unsqueeze_dim == unsqueeze_dim and form.fits(q, k, cos, sin):
                same_dtype = cos.dtype is q.dtype
                wide = self.wide_tables and cos.dtype is torch.float32
                return form if same_dtype or wide else None
        return None


def parameters_of(function: Any) -> tuple[str, ...]:
    """The names of a function's parameters if it can be called with queries, keys, cos and sin.

    Only such functions are probed: no other code of a model is run.
    """
    if not inspect.isfunction(function):
        return ()
    parameters = list(inspect.signature(function).parameters.values())
    names = tuple(parameter.name for parameter in parameters)
    positional = [
        parameter
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.POSITIONAL_ONLY)
    ]
    if len(positional) < 4 or len(positional) < len(parameters):
        return ()
    if "cos" not in names[2] or "sin" not in names[3]:
        return ()
    return names if all(p.default is not p.empty for p in parameters[4:]) else ()


def probe(name: str, function: Callable[..., Any]) -> Rotary:
    """Find under which forms of call a function is rope.

    It is called with queries and keys of each layout and tables of each width, all of random
    numbers, and with each dimension at which tables are widened if it has a parameter
    `unsqueeze_dim`. The results are compared with the definition of rope under every option: in
    float32 values and gradients, in bfloat16 and float16 values within the roundings of code that
    rounds after every operation.

    Raises:
        NotAnOp: none is rope; the text gives the reason.
    """
    parameters = parameters_of(function)
    defaults = {p.name: p.default for p in inspect.signature(function).parameters.values()}
    default = defaults.get("unsqueeze_dim")
    reason = NotAnOp(f"{name} computes no rope")
    forms = []
    for unsqueeze_dim in (default,) if default is None else sorted({default, 1, 2}):
        more = {} if default is None else {"unsqueeze_dim": unsqueeze_dim}
        for layout in LAYOUTS:
            for table_width in TABLE_WIDTHS:
                tensors = _tensors(layout, table_width)
                try:
                    found = _called(name, function, tensors, more)
                except NotAnOp:
                    continue
                for form in _candidates(unsqueeze_dim, layout, table_width):
                    if _agree(found, form, tensors):
                        _compare_gradients(name, function, form, more)
                        for dtype in (torch.bfloat16, torch.float16):
                            _compare_roundings(name, function, form, more, dtype, dtype)
                        forms.append(form)
                        break
    if not forms:
        raise reason
    try:
        more = {} if default is None else {"unsqueeze_dim": forms[0].unsqueeze_dim}
        _compare_roundings(name, function, forms[0], more, torch.bfloat16, torch.float32)
        wide_tables = True
    except NotAnOp:
        wide_tables = False
    return Rotary(name, parameters, default, wide_tables, tuple(forms))


def _candidates(unsqueeze_dim: int | None, layout: str, table_width: str) -> Iterator[Form]:
    for interleaved in (False, True):
        options = (("interleaved", interleaved),)
        yield Form(unsqueeze_dim, layout, table_width, False, options)


def _tensors(
    layout: str, table_width: str, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys and tables; nothing in the tables is repeated, as no cosine and sine are."""
    inward, outward = LAYOUTS[layout]
    batch = inward(outward(torch.empty(1, 1, 1, 1))).shape[0] if layout == "shd" else BATCH
    heads = [
        outward(4 * uniform((batch, count, SEQUENCE, WIDTH), seed=count)).to(dtype)
        for count in (HEADS, K_HEADS)
    ]
    leading = (SEQUENCE,) if layout == "shd" else (BATCH, SEQUENCE)
    tables = [uniform((*leading, TABLE_WIDTHS[table_width]), seed=7 + i) + 0.7 for i in range(2)]
    return heads[0], heads[1], tables[0].to(dtype), tables[1].to(dtype)


def _called(
    name: str, function: Callable[..., Any], tensors: Sequence[Tensor], more: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    try:
        found = function(*(tensor.clone() for tensor in tensors), **more)
    except Exception as error:
        raise NotAnOp(f"{name} fails on the CPU: {first_line(error)}") from None
    if (
        not isinstance(found, (tuple, list))
        or len(found) != 2
        or any(not isinstance(y, Tensor) for y in found)
        or any(y.shape != x.shape for y, x in zip(found, tensors, strict=False))
    ):
        raise NotAnOp(f"{name} does not return queries and keys of their shapes")
    return found[0], found[1]


def _definition(form: Form, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    return form(library.OPS["rope"].definition, *tensors)


def _agree(found: Sequence[Tensor], form: Form, tensors: Sequence[Tensor]) -> bool:
    try:
        expected = _definition(form, tensors)
    except RuntimeError:
        return False
    return all(
        bool(((y - wanted).abs() <= FLOAT32_BOUND * (1 + wanted.abs())).all())
        for y, wanted in zip(found, expected, strict=True)
    )


def _compare_gradients(
    name: str, function: Callable[..., Any], form: Form, more: dict[str, Any]
) -> None:
    with torch.enable_grad():
        q, k, cos, sin = _tensors(form.layout, form.table_width)
        leaves = (q.requires_grad_(), k.requires_grad_())
        expected_y = _definition(form, (q, k, cos, sin))
        dy = [uniform(y.shape, seed=11) for y in expected_y]
        expected = torch.autograd.grad(expected_y, leaves, dy)
        try:
            found = torch.autograd.grad(_called(name, function, (q, k, cos, sin), more), leaves, dy)
        except RuntimeError as error:
            text = f"the gradient of {name} cannot be taken: {first_line(error)}"
            raise NotAnOp(text) from None
    for ours, theirs in zip(expected, found, strict=True):
        if not ((ours - theirs).abs() <= FLOAT32_BOUND * (1 + ours.abs())).all():
            raise NotAnOp(f"{name} has the values of rope but another gradient")


def _compare_roundings(
    name: str,
    function: Callable[..., Any],
    form: Form,
    more: dict[str, Any],
    dtype: torch.dtype,
    table_dtype: torch.dtype,
) -> None:
    """Hold the values to those of code that rounds both products and the sum."""
    q, k, _, _ = _tensors(form.layout, form.table_width, dtype)
    _, _, cos, sin = _tensors(form.layout, form.table_width, table_dtype)
    found = _called(name, function, (q, k, cos, sin), more)
    if any(y.dtype is not dtype for y in found):
        raise NotAnOp(
            f"{name} returns {dtype_name(found[0].dtype)} for queries of {dtype_name(dtype)}"
        )
    exact = [x.double() for x in (q, k, cos, sin)]
    magnitudes = _definition(form, [exact[0].abs(), exact[1].abs(), *exact[2:]])
    turned = _definition(form, [exact[0].abs(), exact[1].abs(), exact[2], -exact[3]])
    for y, expected, one, other in zip(
        found, _definition(form, exact), magnitudes, turned, strict=True
    ):
        # The products are at most this, as tables are positive; each of three roundings moves
        # them by half an eps.
        largest = torch.maximum(one.abs(), other.abs())
        bound = torch.finfo(dtype).eps * 1.5 * largest
        if not ((y.double() - expected).abs() <= bound).all():
            raise NotAnOp(
                f"{name} has the values of rope in float32 but rounds elsewhere in"
                f" {dtype_name(dtype)}"
            )
