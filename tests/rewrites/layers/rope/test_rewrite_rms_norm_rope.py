"""rms_norm_rope, found in the code of models: norms of queries and keys, then their rotation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import liger_ops
import norm_spellings as norms
from norm_spellings import EPS
from rewriting import check, each_dtype, refused, values
from rotations import HEADS, KV_HEADS, B, D, S, cohere, heads, llama, phi3, used

Norm = Callable[[Tensor, Tensor], Tensor]
FOUND = {"rms_norm_rope": 1}
LEFT = {"rms_norm": 2, "rope": 1}


def torch_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (D,), weight, EPS)


def unweighted(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (D,), None, EPS)


def inputs(
    dtype: torch.dtype = torch.float32, columns: int = D, rows: int = B, length: int = S
) -> list[Tensor]:
    """Queries and keys, the weights of their norms, and the tables."""
    angles = torch.linspace(0.1, 3.0, length * columns // 2).view(1, length, -1).repeat(1, 1, 2)
    weights = [values(D, dtype=dtype, seed=seed) for seed in (2, 3)]
    return [*heads(dtype, rows, length), *weights, angles.cos().to(dtype), angles.sin().to(dtype)]


def attention(
    norm: Norm, rotation: Any = llama, transposed_first: bool = False, key_norm: Norm | None = None
) -> Callable[..., tuple[Tensor, Tensor]]:
    """The norms before the heads are transposed, as in Qwen3, or after, as in Gemma 3."""

    def turned(x: Tensor, weight: Tensor, of: Norm) -> Tensor:
        if transposed_first:
            return of(x.transpose(1, 2), weight)
        return of(x, weight).transpose(1, 2)

    def function(q: Any, k: Any, q_weight: Any, k_weight: Any, cos: Any, sin: Any) -> Any:
        q, k = turned(q, q_weight, norm), turned(k, k_weight, key_norm or norm)
        return used(rotation(q, cos, sin)), used(rotation(k, cos, sin))

    return function


@pytest.mark.quick(rewrites=("rms_norm_rope",))
@each_dtype
@pytest.mark.parametrize("transposed_first", (False, True), ids=("qwen3", "gemma3"))
@pytest.mark.parametrize(
    ("norm", "offset", "mode"),
    (
        (norms.llama, 0.0, "llama"),
        (norms.gemma, 1.0, "gemma"),
        (norms.unwidened, 0.0, "none"),
        (torch_norm, 0.0, "gemma"),
    ),
)
def test_norm_and_rotation(norm, offset, mode, transposed_first, dtype):
    found = check(attention(norm, llama, transposed_first), *inputs(dtype), counts=FOUND)
    (call,) = found.calls("rms_norm_rope")
    assert (call["eps"], call["offset"]) == (EPS, offset)
    # In float32 the modes are the same, and a written norm is found as the first of them.
    assert call["casting_mode"] == mode or dtype is torch.float32
    assert not call["interleaved"] and not call["per_pair"]
    shapes = [tuple(call[x].meta["example_value"].shape) for x in ("q", "k")]
    assert shapes == [(B, HEADS, S, D), (B, KV_HEADS, S, D)]
    # The heads are read where the projection wrote them.
    assert call["q"].meta["example_value"].stride() == (S * HEADS * D, D, HEADS * D, 1)
    assert found.calls("rms_norm") == found.calls("rope") == []


@pytest.mark.parametrize(
    ("rotation", "columns", "interleaved"), ((phi3, D // 2, False), (cohere, D, True))
)
def test_other_rotations(rotation, columns, interleaved):
    function = attention(norms.llama, rotation)
    found = check(function, *inputs(columns=columns), counts=FOUND)
    (call,) = found.calls("rms_norm_rope")
    assert call["interleaved"] == interleaved
    assert call["cos"].meta["example_value"].shape[-1] == columns


def test_several_views_between():
    """The views are made of the op's queries in the order in which the code makes them."""

    def turned(x: Tensor, weight: Tensor) -> Tensor:
        return norms.llama(x.transpose(0, 1), weight).transpose(0, 1).transpose(1, 2)

    def function(q: Any, k: Any, q_weight: Any, k_weight: Any, cos: Any, sin: Any) -> Any:
        q, k = turned(q, q_weight), turned(k, k_weight)
        return used(llama(q, cos, sin)), used(llama(k, cos, sin))

    check(function, *inputs(), counts=FOUND)


def test_norms_that_are_left_to_inductor():
    """The rewrite finds written norms where the rewrite rms_norm is off."""
    names = ["rope", "rms_norm_rope"]
    check(attention(norms.llama), *inputs(torch.bfloat16), counts=FOUND, names=names)


def test_without_weights():
    found = check(attention(unweighted), *inputs(), counts=FOUND)
    (call,) = found.calls("rms_norm_rope")
    assert call["q_weight"] is call["k_weight"] is None


def test_any_number_of_rows_and_positions():
    function = attention(norms.llama)
    then = inputs(rows=4, length=7)
    check(function, *inputs(), then=then, counts=FOUND, dynamic=True)


@pytest.mark.parametrize("norm", (norms.llama, norms.gemma))
def test_queries_alone(norm):
    """As in the layers of Gemma 3n and Gemma 4 that share keys."""

    def function(q: Any, k: Any, q_weight: Any, k_weight: Any, cos: Any, sin: Any) -> Any:
        return used(llama(norm(q, q_weight).transpose(1, 2), cos, sin))

    found = check(function, *inputs(), counts=FOUND)
    (call,) = found.calls("rms_norm_rope")
    assert call["k"].meta["example_value"].shape[1] == 0


def test_ops_of_the_users_code():
    """`fuse` calls the op so in a norm whose parameters FSDP2 holds."""

    def function(q: Any, k: Any, q_weight: Any, k_weight: Any, cos: Any, sin: Any) -> Any:
        norm = torch.ops.liger.rms_norm.default
        q = norm(q, casting_mode="gemma", offset=1.0, weight=q_weight).transpose(1, 2)
        k = norm(k, casting_mode="gemma", offset=1.0, weight=k_weight).transpose(1, 2)
        q, k = liger_ops.rope(q, k, cos, sin=sin)
        return used(q), used(k)

    found = check(function, *inputs(), counts=FOUND)
    (call,) = found.calls("rms_norm_rope")
    assert (call["offset"], call["casting_mode"], call["eps"]) == (1.0, "gemma", 1e-6)


def test_checkpointed():
    function = attention(norms.llama)
    check(lambda *given: checkpoint(function, *given, use_reentrant=False), *inputs(), counts=FOUND)


def test_without_gradients():
    check(torch.no_grad()(attention(norms.llama)), *inputs(), counts=FOUND)


def with_wide_tables() -> list[Tensor]:
    *tensors, cos, sin = inputs(torch.bfloat16)
    return [*tensors, cos.float(), sin.float()]


@pytest.mark.parametrize("wide_weights", (False, True), ids=("narrow", "wide"))
@pytest.mark.parametrize("norm", (norms.llama, norms.gemma))
def test_under_autocast(norm, wide_weights):
    """As the norm alone: in the dtypes of its inputs, where autocast would cast those of the op."""

    def function(*given: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return attention(norm)(*given)

    q, k, q_weight, k_weight, cos, sin = inputs(torch.bfloat16)
    if wide_weights:
        q_weight, k_weight, cos, sin = (x.float() for x in (q_weight, k_weight, cos, sin))
    names = ["rope", "rms_norm_rope"]
    counts = {"rope": 1} if wide_weights else FOUND
    found = check(function, q, k, q_weight, k_weight, cos, sin, counts=counts, names=names)
    if wide_weights:
        # The code's results are float32.
        (reason,) = found.reasons("rms_norm_rope")
        assert "torch.float32" in reason


def queries_alone_normalised(
    q: Any, k: Any, q_weight: Any, k_weight: Any, cos: Any, sin: Any
) -> Any:
    q, k = norms.llama(q, q_weight).transpose(1, 2), k.transpose(1, 2)
    return used(llama(q, cos, sin)), used(llama(k, cos, sin))


def used_elsewhere(q: Any, k: Any, q_weight: Any, k_weight: Any, cos: Any, sin: Any) -> Any:
    normed, k = norms.llama(q, q_weight), norms.llama(k, k_weight).transpose(1, 2)
    q = normed.transpose(1, 2)
    return used(llama(q, cos, sin)), used(llama(k, cos, sin)), normed.sum()


def view_used_elsewhere(q: Any, k: Any, q_weight: Any, k_weight: Any, cos: Any, sin: Any) -> Any:
    q, k = norms.llama(q, q_weight).transpose(1, 2), norms.llama(k, k_weight).transpose(1, 2)
    return used(llama(q, cos, sin)), used(llama(k, cos, sin)), k.sum()


@torch.no_grad()
def weight_written(q: Any, k: Any, q_weight: Any, k_weight: Any, cos: Any, sin: Any) -> Any:
    weight = q_weight * 2.0
    q, k = norms.llama(q, weight).transpose(1, 2), norms.llama(k, k_weight).transpose(1, 2)
    weight.mul_(3.0)
    return used(llama(q, cos, sin)), used(llama(k, cos, sin)), weight


@torch.no_grad()
def input_written(q: Any, k: Any, q_weight: Any, k_weight: Any, cos: Any, sin: Any) -> Any:
    x = k * 2.0
    q, k = norms.llama(q, q_weight).transpose(1, 2), norms.llama(x, k_weight).transpose(1, 2)
    x.add_(1.0)
    return used(llama(q, cos, sin)), used(llama(k, cos, sin)), x


def norm_without_gradient(q: Any, k: Any, q_weight: Any, k_weight: Any, cos: Any, sin: Any) -> Any:
    with torch.no_grad():
        q, k = norms.llama(q, q_weight).transpose(1, 2), norms.llama(k, k_weight).transpose(1, 2)
    return used(llama(q, cos, sin)), used(llama(k, cos, sin))


def of_all_heads(q: Any, k: Any, q_weight: Any, k_weight: Any, cos: Any, sin: Any) -> Any:
    """As in OLMo 2."""
    weights = q_weight.repeat(HEADS), k_weight.repeat(KV_HEADS)
    q, k = (
        norms.llama(x.flatten(2), w).view(x.shape).transpose(1, 2)
        for x, w in zip((q, k), weights, strict=True)
    )
    return used(llama(q, cos, sin)), used(llama(k, cos, sin))


def other_eps(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (D,), weight, 2 * EPS)


NEAR_MISSES = {
    "queries-alone": (queries_alone_normalised, "without a norm", {"rms_norm": 1, "rope": 1}),
    "used-elsewhere": (used_elsewhere, "is used elsewhere, by", LEFT),
    "view-used-elsewhere": (view_used_elsewhere, "is used elsewhere, by", LEFT),
    "weight-written": (weight_written, "written in place", LEFT),
    "input-written": (input_written, "written in place", LEFT),
    "no_grad": (norm_without_gradient, "different gradient or autocast modes", LEFT),
    "all-heads": (of_all_heads, "is viewed as (2, 5, 6, 16)", LEFT),
    "eps": (attention(torch_norm, key_norm=other_eps), "has the eps", LEFT),
    "offset": (attention(norms.gemma, key_norm=norms.olmo2), "has the offset", LEFT),
    "casting-mode": (attention(norms.llama, key_norm=norms.olmo2), "has the casting mode", LEFT),
}  # fmt: skip


@pytest.mark.parametrize(("function", "reason", "counts"), NEAR_MISSES.values(), ids=NEAR_MISSES)
def test_near_misses(function, reason, counts):
    """In bfloat16, in which the casting modes differ."""
    given = inputs(torch.bfloat16)
    refused(function, *given, op="rms_norm_rope", reason=reason, counts=counts)


def test_a_norm_that_is_cast_before_the_rotation():
    """Tables of float32 make queries of float32, which the op would round."""
    given = with_wide_tables()
    reason = "is cast to torch.float32"
    refused(attention(norms.llama), *given, op="rms_norm_rope", reason=reason, counts=LEFT)


def test_a_rotation_before_the_norm():
    def function(q: Any, k: Any, q_weight: Any, k_weight: Any, cos: Any, sin: Any) -> Any:
        q, k = llama(q.transpose(1, 2), cos, sin), llama(k.transpose(1, 2), cos, sin)
        return used(norms.llama(q, q_weight)), used(norms.llama(k, k_weight))

    refused(function, *inputs(), op="rms_norm_rope", counts=LEFT)
