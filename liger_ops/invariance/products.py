"""PyTorch's matrix products with the same bits for a row in every batch.

`a @ b` is a function of the rows of a. On a GPU cuBLASLt without split-K gives a row the same bits
among any number of rows in float16 and bfloat16, but for a single row of some sizes (measured on an
H200, torch 2.11: 8 to 4096 columns, sums of 1536 to 4096); in float32 it does not, and a kernel of
this package replaces it, as it does for batches of products. On a CPU products of always as many
rows have that property.

A product whose left operand is a transposed matrix and whose right one is not, as the gradient of a
weight, dy.T @ x, is taken for a sum over rows: it is computed as it is.

The functions that replace an operator take it and its own function first, and return NotImplemented
where that is to be called as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..invariant_mode import NotInvariantError
from .rows import Base, Function, aligned, as_it_is, compute, described

# Columns and lengths of sums of multiples of this leave no remainder in the vectors of a CPU.
EVEN = 32


def mm(overload: Any, base: Base, a: Tensor, b: Tensor, *dtype: torch.dtype) -> Tensor:
    """Compute a @ b as a function of the rows of a."""
    if _is_left_alone(a, b):
        return NotImplemented
    return _product(base, None, a, b, dtype, {})


def addmm(
    overload: Any, base: Base, x: Tensor, a: Tensor, b: Tensor, *dtype: torch.dtype,
    beta: Any = 1, alpha: Any = 1,
) -> Tensor:  # fmt: skip
    """Compute beta * x + alpha * a @ b as a function of the rows of a, and of x if it has some."""
    options = {"beta": beta, "alpha": alpha}
    if _is_left_alone(a, b):
        return NotImplemented
    return _product(base, x, a, b, dtype, options)


def bmm(overload: Any, base: Base, a: Tensor, b: Tensor, *dtype: torch.dtype) -> Tensor:
    """Compute each product by a kernel of this package on a GPU, or as mm."""
    if not is_rounded(a) or 0 in (a.numel(), b.numel()):
        return NotImplemented
    if own := own_product(a):
        return own(aligned(a), b, *dtype)
    return torch.stack([torch.mm(*pair, *dtype) for pair in zip(a, b, strict=True)])


def baddbmm(
    overload: Any, base: Base, x: Tensor, a: Tensor, b: Tensor, *dtype: torch.dtype,
    beta: Any = 1, alpha: Any = 1,
) -> Tensor:  # fmt: skip
    """Compute each product by a kernel of this package on a GPU, or as addmm."""
    options = {"beta": beta, "alpha": alpha}
    if not is_rounded(a) or 0 in (a.numel(), b.numel()):
        return NotImplemented
    x = x.expand(a.shape[0], a.shape[1], b.shape[2])
    if own := own_product(a):
        return _sum(x, own(aligned(a), b, torch.float32), dtype or (a.dtype,), options)
    triples = zip(x, a, b, strict=True)
    return torch.stack([torch.addmm(*triple, *dtype, **options) for triple in triples])


def mv(overload: Any, base: Base, a: Tensor, b: Tensor) -> Tensor:
    """Compute a product with one column, as mm."""
    return torch.mm(a, b.unsqueeze(1)).squeeze(1)


def addmv(
    overload: Any, base: Base, x: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1
) -> Tensor:
    """Compute a product with one column, as addmm."""
    x = x.expand(a.shape[0]).unsqueeze(1)
    return torch.addmm(x, a, b.unsqueeze(1), beta=beta, alpha=alpha).squeeze(1)


def grouped_mm(
    overload: Any, base: Base, a: Tensor, b: Tensor, offs: Any = None, *rest: Any
) -> Tensor:
    """Compute as PyTorch does on a GPU, after a trial, and as mm for each group on a CPU.

    The gradients of weights, for which b is a matrix too, are sums over rows.
    """
    if a.dim() != 2 or b.dim() != 3 or offs is None or a.shape[0] == 0 or any(rest[:1]):
        return NotImplemented
    if not a.is_cuda:
        y = a.new_zeros((a.shape[0], b.shape[2]))
        ends = offs.tolist()
        for start, end, weight in zip((0, *ends), ends, b, strict=False):
            y[start:end] = a[start:end] @ weight
        return y if len(rest) < 2 or rest[1] is None else y.to(rest[1])

    def of_first_group(a: Tensor) -> tuple[Tensor]:
        return (base(a, b, torch.full_like(offs, a.shape[0]), *rest),)

    compute("_grouped_mm", described(b), [of_first_group], aligned(a[:1]), by=(as_it_is,))
    return base(aligned(a), b, offs, *rest)


def refuse(overload: Any, base: Base, *args: Any, **options: Any) -> Any:
    """Refuse the operator by name."""
    raise NotInvariantError(f"liger_ops.invariant: {overload} is not covered")


def is_rounded(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _is_left_alone(a: Tensor, b: Tensor) -> bool:
    """Return whether a @ b is exact, empty, or a sum over rows."""
    is_sum = a.stride(1) != 1 and a.stride(0) == 1 and b.stride(1) == 1
    return is_sum or not is_rounded(a) or 0 in (a.numel(), b.numel())


def _product(
    base: Base, x: Tensor | None, a: Tensor, b: Tensor, dtype: tuple[torch.dtype, ...],
    options: dict[str, Any],
) -> Tensor:  # fmt: skip
    """Return beta * x + alpha * a @ b, with x as a function of the rows too if it has some."""
    is_transposed = a.stride(0) == 1 and a.stride(1) == a.shape[0] != 1
    if is_transposed and a.requires_grad and torch.is_grad_enabled():
        raise NotInvariantError(
            "liger_ops.invariant: the gradient of a transposed matrix is not covered, because"
            " PyTorch computes its product with a weight transposed too; make it contiguous()"
        )
    columns = b.shape[1]
    b = aligned(b.t()).t() if b.stride(0) == 1 else aligned(b)
    rows = [aligned(a)]
    before: tuple[Tensor, ...] = ()
    if x is not None and x.dim() == 2 and x.shape[0] > 1:
        rows.append(aligned(x.expand(a.shape[0], columns)))
    elif x is not None and x.dim() == 2 and a.shape[0] == 1:
        # One row: whether it is a bias of every row cannot be told. A row of its own is both.
        rows.append(aligned(x.expand(1, columns)))
    elif x is not None:
        before = (aligned(x.reshape(-1).expand(columns)),)
    by_rows = len(rows) > 1

    def as_pytorch(a: Tensor, *x: Tensor) -> tuple[Tensor]:
        return (base(*(x or before), a, b, *dtype, **options),)

    def evenly(a: Tensor, *x: Tensor) -> tuple[Tensor]:
        operands = [*(x or before), a]
        even = _even(_even(b.t()).t())
        return (base(*map(_even, operands), even, *dtype, **options)[:, :columns],)

    own = own_product(a)

    def by_own_kernel(a: Tensor, *x: Tensor) -> tuple[Tensor]:
        assert own is not None
        added = (x or before or (None,))[0]
        if added is None:
            return (own(a[None], b[None], *dtype)[0],)
        return (_sum(added, own(a[None], b[None], torch.float32)[0], dtype or (a.dtype,), options),)

    functions: list[Function] = [as_pytorch, evenly if own is None else by_own_kernel]
    key = (by_rows, described(b), *dtype, *options.values())
    return compute("a matrix product", key, functions, *rows)[0]


def own_product(a: Tensor) -> Callable[..., Tensor] | None:
    """Return this package's product of batches of matrices, if it is for a's device and dtype."""
    if not a.is_cuda:
        return None
    from ..lowering.cuda import product

    return product.product if product.takes(a) else None


def _sum(x: Tensor, product: Tensor, dtype: tuple[torch.dtype, ...], options: Any) -> Tensor:
    """Return beta * x + alpha * product, rounded once to the dtype."""
    y = product.mul_(options["alpha"]).add_(x, alpha=options["beta"])
    return y.to(dtype[0])


def _even(x: Tensor) -> Tensor:
    """Complete the last axis with zeros to a multiple of EVEN."""
    return F.pad(x, (0, -x.shape[-1] % EVEN))
