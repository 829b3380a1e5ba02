"""A cast to a narrow dtype and back, at any edge of a module that `fuse` knows: the fused module
rounds as its code does, or is left."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_fuse_changes import KINDS
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import gated_modules as gated
import norm_modules as norms
import rotating_modules as rotating
from casting import Casting, distance, results
from liger_ops import fuse

# Far above the roundings of float32, and below what a narrower dtype rounds of a result.
ROUNDING = 1e-3
NARROW = (torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.int8, torch.bool)
# Children that the new code calls: the casts within them are not the module's.
CALLED = {"mlp": ("linear",), "modulated": ("linear", "silu")}

Made = tuple[Callable[[], nn.Module], Callable[[], Any]]


def kinds(*names: str) -> list[Made]:
    return [KINDS[name][:2] for name in names]


MODULES: dict[str, list[Made]] = {
    "norm": [
        *kinds("norm", "layer-norm", "gated-norm"),
        *((cls, lambda: (torch.randn(2, 3, 24),))
          for cls in (norms.GemmaStyle, norms.OneRounding, norms.NeverWidened)),
    ],
    "mlp": [
        *kinds("mlp", "limited-mlp"),
        *((cls, lambda: (torch.randn(2, 3, gated.HIDDEN),))
          for cls in (gated.Packed, gated.UpFirst)),
    ],
    "modulated": kinds("modulated-norm"),
    "hyper-connection": kinds("hyper-connection"),
}  # fmt: skip


def casting(module: nn.Module, at: int, dtype: torch.dtype, without: Any) -> tuple[Any, list[int]]:
    """The module with a cast in its forward, and what its calls count."""
    cls, counts = type(module), [0]

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with Casting(at, dtype, without) as cast:
            y = pytree.tree_map(cast.cast, cls.forward(self, *args, **kwargs))
        counts[0] = cast.count
        return y

    forward.__signature__ = inspect.signature(cls.forward)  # type: ignore[attr-defined]
    module.__class__ = type(cls.__name__, (cls,), {"forward": forward})
    return module, counts


@pytest.mark.parametrize("kind", MODULES)
@given(data=st.data())
@settings(max_examples=20)
def test_a_cast_stays_or_the_module_does(kind: str, data: st.DataObject) -> None:
    torch.manual_seed(0)
    make, arguments = data.draw(st.sampled_from(MODULES[kind]))
    without, args = CALLED.get(kind, ()), arguments()
    module = make()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    plain, counts = casting(copy.deepcopy(module), -1, torch.float32, without)
    plain(*args)
    at = data.draw(st.integers(0, counts[0] - 1))
    narrow = data.draw(st.sampled_from(NARROW))
    plain, _ = casting(copy.deepcopy(module), at, narrow, without)
    fused, _ = casting(module, at, narrow, without)
    try:
        expected = results(plain, args)
    except (RuntimeError, NotImplementedError):
        # A gradient cannot have such a dtype.
        return
    fuse(fused)
    assert distance(expected, results(fused, args)) < ROUNDING


class RoundedNorm(nn.Module):
    """Rounds x in the product, and not in the statistic."""

    def __init__(self, narrow: torch.dtype) -> None:
        super().__init__()
        self.weight, self.narrow = nn.Parameter(torch.ones(16)), narrow

    def forward(self, x: Tensor) -> Tensor:
        h = x.to(self.narrow).float()
        y = h * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * y.to(x.dtype)


@pytest.mark.parametrize("narrow", [torch.float8_e4m3fn, torch.int8, torch.bool, torch.bfloat16])
def test_a_norm_that_rounds_is_left_with_the_reason(narrow):
    report = fuse(RoundedNorm(narrow))
    (left,) = report.left
    assert not report.fused and (f"rounded to {narrow}" in left.reason or narrow is torch.bfloat16)


def rounded_tables(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """Its tables are rounded to float32, which only those of float64 notice."""
    return rotating.llama(q, k, cos.float().to(cos.dtype), sin.float().to(sin.dtype))


def rounded_results(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return tuple(y.float().to(y.dtype) for y in rotating.llama(q, k, cos, sin))


@pytest.mark.parametrize("function", [rounded_tables, rounded_results])
def test_float64_keeps_a_cast_to_float32(function, monkeypatch):
    rotating.set_rotate(monkeypatch, function)
    module = rotating.Rotating()
    assert fuse(module).fused
    assert rotating.ops_of(module, rotating.tensors()) == ["rope"]
    wide = [x / 3 for x in rotating.tensors(dtype=torch.float64)]
    assert all(map(torch.equal, module(*wide), function(*wide)))
