"""modulated_layer_norm under an autocast that computes norms in float32, as that of GPUs does."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import modulated_blocks as blocks
from liger_ops import library
from rewriting import Rewriter, values

WIDE, NARROW = torch.float32, torch.bfloat16


@pytest.fixture
def norms_in_float32() -> Iterator[None]:
    """Give a CPU the autocast rules of a GPU, for PyTorch's norm and for the two ops."""
    excluded = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    cast = lambda one: library._autocast_value(one, WIDE)

    def layer_norm(x, shape, weight=None, bias=None, eps=1e-5, cudnn=True):
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return torch.layer_norm(cast(x), shape, cast(weight), cast(bias), eps, cudnn)

    scoped = torch.library._scoped_library
    with scoped("aten", "IMPL") as aten, scoped("liger", "IMPL") as liger:
        aten.impl("layer_norm", layer_norm, "AutocastCPU")
        for name, keep in (("layer_norm", ()), ("modulated_layer_norm", ("scale", "shift"))):
            op = library.OPS[name]
            on_cpu = SimpleNamespace(
                name=op.name, overload=op.overload, custom_op=SimpleNamespace(_lib=liger)
            )
            library._under_autocast(on_cpu, "AutocastCPU", cast, keep)
        yield


def cast_back(norm: nn.LayerNorm, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return blocks.zero(norm, x, scale, shift).to(x.dtype)


@pytest.mark.parametrize(
    ("block", "dtype", "scale_dtype", "rows"),
    (
        (blocks.zero, NARROW, NARROW, (2, 64)),
        (blocks.zero, WIDE, NARROW, (2, 64)),
        (blocks.wan, NARROW, WIDE, (2, 1, 64)),
        (cast_back, NARROW, NARROW, (2, 64)),
    ),
    ids=("narrow-x", "wide-x", "wan", "cast-back"),
)
@pytest.mark.usefixtures("norms_in_float32")
def test_rounds_where_the_code_rounds(block, dtype, scale_dtype, rows):
    """1 + scale rounds to bfloat16 where scale is bfloat16, beside a norm in float32."""
    norm = nn.LayerNorm(64, 1e-6, elementwise_affine=False)

    def function(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        with torch.autocast("cpu", NARROW):
            return block(norm, x, scale, shift)

    x = values(2, 5, 64, dtype=dtype).detach()
    scale, shift = (values(*rows, dtype=scale_dtype, seed=i).detach() for i in (0, 1))
    torch._dynamo.reset()
    rewriter = Rewriter()
    result = torch.compile(function, backend=rewriter, fullgraph=True)(x, scale, shift)
    expected = function(x, scale, shift)
    assert rewriter.counts() == {"modulated_layer_norm": 1}
    # The norms differ by float32's rounding. If 1 + scale did not round, the error would be 1e-3.
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-6)
