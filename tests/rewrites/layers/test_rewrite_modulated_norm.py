"""modulated_layer_norm and modulated_rms_norm, found in the blocks of diffusion transformers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import modulated_blocks as blocks
from norm_spellings import EPS, gemma, unwidened
from rewriting import check, each_dtype, refused, values

NORMS: dict[str, Callable[[], nn.Module]] = {
    "modulated_layer_norm": lambda: nn.LayerNorm(8, 1e-6, elementwise_affine=False),
    "modulated_rms_norm": lambda: blocks.RMSNorm(8, 1e-6),
}
each_norm = pytest.mark.parametrize("op", NORMS)
BLOCKS = [blocks.dit, blocks.zero, blocks.continuous]


@each_dtype
@each_norm
@pytest.mark.parametrize("block", BLOCKS)
def test_modulation_of_each_sample(block, op, dtype):
    norm = NORMS[op]().to(dtype)
    found = check(
        lambda x, scale, shift: block(norm, x, scale, shift),
        *(values(*shape, dtype=dtype) for shape in ((2, 3, 8), (2, 8), (2, 8))),
        counts={op: 1},
    )
    (call,) = found.calls(op)
    assert call["eps"] == 1e-6
    assert (call["weight"] is None) == (op == "modulated_layer_norm")
    assert not found.calls("layer_norm") and not found.calls("rms_norm")


@each_dtype
@pytest.mark.parametrize("affine", (False, True))
@pytest.mark.parametrize("tokens", (1, 3))
def test_wan_in_float32(tokens, affine, dtype):
    """A scale for each sample, and for each token as in Wan 2.2."""
    norm = blocks.FP32LayerNorm(8, 1e-6, elementwise_affine=affine)
    found = check(
        lambda x, scale, shift: blocks.wan(norm, x, scale, shift),
        *(values(2, 3, 8, dtype=dtype), values(2, tokens, 8), values(2, tokens, 8, seed=1)),
        counts={"modulated_layer_norm": 1},
    )
    (call,) = found.calls("modulated_layer_norm")
    assert call["casting_mode"] == "float32"
    assert call["x"].meta["example_value"].dtype == dtype, "x is stored in float32"


@each_norm
@pytest.mark.parametrize("after", (False, True))
def test_scale_alone(op, after):
    """As in Lumina: no shift."""
    norm = NORMS[op]()

    def function(x, scale):
        factor = (1 + scale)[:, None] if after else scale.unsqueeze(1) + 1.0
        return norm(x) * factor

    check(function, values(2, 3, 8), values(2, 8), counts={op: 1})


@pytest.mark.quick(rewrites=("modulated_rms_norm",))
@pytest.mark.parametrize(
    ("norm", "mode"), ((gemma, "gemma"), (unwidened, "none")), ids=("gemma", "none")
)
def test_casting_mode_of_the_norm(norm, mode):
    function = lambda x, weight, scale: norm(x, weight) * (1 + scale) + scale
    dtype = torch.bfloat16
    inputs = (values(2, 3, 8, dtype=dtype), values(8, dtype=dtype), values(8, dtype=dtype, seed=1))
    found = check(function, *inputs, counts={"modulated_rms_norm": 1})
    (call,) = found.calls("modulated_rms_norm")
    assert call["casting_mode"] == mode and call["eps"] == EPS


@pytest.mark.quick(rewrites=("modulated_layer_norm",))
def test_any_number_of_samples_and_tokens():
    norm = NORMS["modulated_layer_norm"]()
    check(
        lambda x, scale, shift: blocks.dit(norm, x, scale, shift),
        *(values(2, 3, 8), values(2, 8), values(2, 8, seed=1)),
        then=(values(4, 5, 8), values(4, 8), values(4, 8, seed=1)),
        counts={"modulated_layer_norm": 1},
        dynamic=True,
    )


class Block(nn.Module):
    """A residual block with two modulations of six chunks, as `AdaLayerNormZero` makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8, 1e-6, elementwise_affine=False)
        self.linear = nn.Linear(8, 48)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        chunks = self.linear(F.silu(embedding)).chunk(6, 1)
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = chunks
        x = x + gate.unsqueeze(1) * torch.tanh(blocks.zero(self.norm, x, scale, shift))
        return x + gate_mlp.unsqueeze(1) * blocks.zero(self.norm, x, scale_mlp, shift_mlp)


def test_chunks_of_a_projection():
    check(Block(), values(2, 3, 8), values(2, 8), counts={"modulated_layer_norm": 2})


@each_dtype
@each_norm
def test_two_modulations_of_one_norm(op, dtype):
    """As in the dual attention of SD3.5, here of rows that a modulation has made."""
    norm = NORMS[op]().to(dtype)

    def dual(x: Tensor, *rows: Tensor) -> tuple[Tensor, Tensor]:
        y = norm(blocks.zero(norm, x, rows[0], rows[1]))
        first = y * (1 + rows[2][:, None]) + rows[3][:, None]
        return first, y * (1 + rows[4][:, None]) + first.mean(1, keepdim=True)

    rows = (values(2, 8, dtype=dtype, seed=i) for i in range(5))
    found = check(dual, values(2, 3, 8, dtype=dtype), *rows, counts={op: 3})
    assert not found.calls("layer_norm") and not found.calls("rms_norm")


def of_positions(x: Tensor, scale: Tensor) -> Tensor:
    """scale[t] is for position t of every sample, not for sample t."""
    return F.layer_norm(x, (8,)) * (1 + scale) + scale


def with_another_user(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    y = F.layer_norm(x, (8,))
    return y * (1 + scale[:, None]), y * (1 - scale[:, None])


def with_another_modulation(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """One of the two modulations is of positions."""
    y = F.layer_norm(x, (8,))
    return y * (1 + scale[:, None]), y * (1 + scale)


def with_another_shift(x: Tensor, scale: Tensor) -> Tensor:
    return F.layer_norm(x, (8,)) * (1 + scale[:, None]) + scale.mean(0)


def written(x: Tensor, scale: Tensor) -> Tensor:
    y = F.layer_norm(x, (8,))
    factor = 1 + scale[:, None]
    return y.mul_(2.0) * factor + scale[:, None]


NEAR_MISSES = {
    "positions": (of_positions, "not that of whole samples"),
    "another-user": (with_another_user, "is used elsewhere"),
    "another-modulation": (with_another_modulation, "not that of whole samples"),
    "two": (
        lambda x, scale: F.layer_norm(x, (8,)) * (2 + scale[:, None]) + scale[:, None],
        "add has 2 where the op has 1",
    ),
    "without-one": (lambda x, scale: F.layer_norm(x, (8,)) * scale[:, None] + scale[:, None], ""),
}


@pytest.mark.parametrize(("function", "reason"), NEAR_MISSES.values(), ids=NEAR_MISSES)
def test_near_misses(function, reason):
    """There are as many samples as tokens: scale has the shape of either."""
    found = refused(
        function, *(values(3, 3, 8), values(3, 8)), op="modulated_layer_norm", reason=reason,
        counts={"layer_norm": 1},
    )  # fmt: skip
    assert found.calls("modulated_layer_norm") == []


def test_a_shift_of_another_form_stays():
    inputs = (values(3, 3, 8), values(3, 8))
    found = check(with_another_shift, *inputs, counts={"modulated_layer_norm": 1})
    (call,) = found.calls("modulated_layer_norm")
    assert call["shift"] is None


def test_a_norm_written_in_place():
    found = check(written, values(3, 3, 8), values(3, 8), counts={"layer_norm": 1})
    assert found.calls("modulated_layer_norm") == []


def test_a_scale_that_rounds_beside_a_float32_norm():
    norm = blocks.FP32LayerNorm(8, 1e-6, elementwise_affine=False)
    dtype = torch.bfloat16
    inputs = (values(2, 3, 8, dtype=dtype), *(values(2, 1, 8, dtype=dtype, seed=i) for i in (0, 1)))
    found = check(
        lambda x, scale, shift: blocks.wan(norm, x, scale, shift),
        *inputs,
        counts={"modulated_layer_norm": 1},
    )
    (call,) = found.calls("modulated_layer_norm")
    assert call["casting_mode"] == "torch", "1 + scale rounds to bfloat16"
    assert call["x"].meta["example_value"].dtype == torch.float32
