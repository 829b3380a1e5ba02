"""gated_rms_norm, found in the code of transformers' models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextRMSNormGated
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

import liger_ops
from norm_modules import EPS, NEARLY_GATED, Gated
from rewriting import Rewriter, check, each_dtype, refused, values

OP = {"gated_rms_norm": 1}
# The rewrites of the gate and of the norm, where they are not one op.
PARTS = {"swiglu": 1, "rms_norm": 1}


def mamba2() -> nn.Module:
    """Older versions of transformers have no groups here."""
    try:
        return MambaRMSNormGated(24, 24, eps=EPS)
    except TypeError:
        return MambaRMSNormGated(24, eps=EPS)


def falcon(groups: int, before: bool) -> nn.Module:
    return FalconH1RMSNormGated(24, EPS, n_groups=groups, norm_before_gate=before)


# A module, and norm_before_gate, group_size, activation and casting_mode.
MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "qwen3-next": (lambda: Qwen3NextRMSNormGated(24, EPS), (True, None, "silu", "llama")),
    "qwen4": (
        lambda: Qwen4ExpTextRMSNormGated(24, EPS, activation="sigmoid"),
        (True, None, "sigmoid", "llama"),
    ),
    "kimi-linear": (lambda: KimiLinearRMSNormGated(24, EPS), (True, None, "sigmoid", "gemma")),
    "mamba2": (mamba2, (False, None, "silu", "llama")),
    "zamba2": (lambda: Zamba2RMSNormGated(24, 8, EPS), (False, 8, "silu", "llama")),
    "falcon-h1": (lambda: falcon(3, True), (True, 8, "silu", "gemma")),
    "falcon-h1-one-group": (lambda: falcon(1, True), (True, None, "silu", "gemma")),
    "falcon-h1-after": (lambda: falcon(3, False), (False, 8, "silu", "gemma")),
}


def made(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    module = MODULES[name][0]()
    nn.init.normal_(module.weight, generator=torch.Generator().manual_seed(2))
    return module.to(dtype)


def inputs(dtype: torch.dtype = torch.float32, rows: tuple[int, ...] = (2, 5)) -> list[Tensor]:
    return [values(*rows, 24, dtype=dtype, seed=seed) for seed in (0, 1)]


@pytest.mark.quick(rewrites=("gated_rms_norm",))
@each_dtype
@pytest.mark.parametrize("name", MODULES)
def test_models(name, dtype):
    found = check(made(name, dtype), *inputs(dtype), counts=OP)
    (call,) = found.calls("gated_rms_norm")
    options = [call[o] for o in ("norm_before_gate", "group_size", "activation")]
    *expected, mode = MODULES[name][1]
    assert options == expected and call["eps"] == EPS
    # float32 rounds nothing in between.
    assert call["casting_mode"] == mode or dtype == torch.float32
    assert call["gate"].meta["example_value"].dtype == dtype, "the op widens the gate itself"


@pytest.mark.parametrize("name", ("qwen3-next", "zamba2", "falcon-h1"))
def test_any_number_of_rows(name):
    """One compilation serves both sizes."""
    then = inputs(rows=(3, 7))
    check(made(name), *inputs(), then=then, counts=OP, dynamic=True)


@each_dtype
@pytest.mark.parametrize("name", ("qwen3-next", "mamba2", "kimi-linear", "falcon-h1-after"))
def test_under_autocast(name, dtype):
    """Weights in float32, and rows in the dtype of a product or of a scan in float32."""
    norm = made(name)

    class Under(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = norm

        def forward(self, x: Tensor, gate: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.norm(x, gate)

    rows = (values(2, 5, 24, dtype=dtype), values(2, 5, 24, dtype=torch.bfloat16, seed=1))
    if name == "mamba2" and dtype == torch.bfloat16:
        reason = "the result would have the dtype torch.bfloat16, not torch.float32"
        refused(Under(), *rows, op="gated_rms_norm", reason=reason, counts=PARTS)
    else:
        check(Under(), *rows, counts=OP)


class Layer(nn.Module):
    """A gated norm between projections; `use_checkpoint` computes it again in the backward."""

    def __init__(self, use_checkpoint: bool = False) -> None:
        super().__init__()
        self.use_checkpoint = use_checkpoint
        self.mixed, self.gate, self.out = (nn.Linear(24, 24, bias=False) for _ in range(3))
        self.norm = Zamba2RMSNormGated(24, 8, EPS)

    def block(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.mixed(x), self.gate(x)))

    def forward(self, x: Tensor) -> Tensor:
        return (
            checkpoint(self.block, x, use_reentrant=False) if self.use_checkpoint else self.block(x)
        )


def test_in_a_checkpointed_block():
    found = check(Layer(use_checkpoint=True), values(2, 5, 24), counts=OP)
    assert len(found.calls("gated_rms_norm")) == 1


def test_explained():
    explanation = liger_ops.explain(Layer(), values(2, 5, 24))
    assert explanation.counts() == OP


# In each, what other rewrites find is still made: the norm or the gate by itself.
NEAR_MISSES: dict[str, tuple[str, dict[str, int]]] = {
    "OtherActivation": ("", {"rms_norm": 1, "geglu": 1}),
    "TwiceGated": ("", PARTS),
    "GateWithoutCast": ("its casts or sizes are not the op's", PARTS),
    "RoundedActivation": ("its casts or sizes are not the op's", PARTS),
    "EpsElsewhere": ("", {}),
    "EpsTwice": ("", {"rms_norm": 1}),
    "NormAlsoReturned": ("is used elsewhere", {"rms_norm": 1}),
    "ActivationRoundsBefore": ("its casts or sizes are not the op's", PARTS),
    "OtherDimension": ("mean has -2 where the op has -1", {"swiglu": 1}),
    "WeightOfPositions": ("its weight has other groups than x", PARTS),
}


@pytest.mark.parametrize("name", NEARLY_GATED)
def test_near_misses(name):
    """In bfloat16, where the positions of rounding show."""
    rows, (reason, counts) = inputs(torch.bfloat16, rows=(2, 3)), NEAR_MISSES[name]
    module = NEARLY_GATED[name]().bfloat16()
    refused(module, *rows, op="gated_rms_norm", reason=reason, counts=counts)


def test_a_gate_of_one_row_is_broadcast():
    x, gate = values(2, 5, 24), values(24, seed=1)
    refused(Gated(), x, gate, op="gated_rms_norm", reason="gate", counts={"rms_norm": 1})


@pytest.mark.parametrize("is_written", (False, True))
def test_a_gate_written_after_its_cast(is_written):
    """The op would read the gate itself, and not the copy that the code made."""
    norm = Gated().bfloat16()

    def function(x: Tensor, gate: Tensor) -> Tensor:
        gate = gate * 2
        wide = gate.float()
        if is_written:
            gate.zero_()
        y = norm.weight * norm.normalised(x).to(x.dtype)
        return (y * F.silu(wide)).to(x.dtype)

    # Not `check`, whose truth is in float32, where the cast copies nothing.
    rewriter, rows = Rewriter(), [one.detach() for one in inputs(torch.bfloat16)]
    with torch.no_grad():
        y = torch.compile(function, backend=rewriter, fullgraph=True)(*rows)
        torch.testing.assert_close(y, function(*rows))
    assert rewriter.counts() == ({"rms_norm": 1} if is_written else OP)
    if is_written:
        assert "gate, which it casts, is written" in rewriter.reasons("gated_rms_norm")[0]
