"""PyTorch's operators have the same bits for a row in every batch, within `liger_ops.invariant`."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

import liger_ops
from liger_ops.invariance import NotInvariantError
from liger_ops.invariance.rows import _ways, blocks
from op_under_test import DEVICE, laid_out

Function = Callable[[Tensor], Tensor]
WEIGHTS = {n: torch.randn(n, 40, generator=torch.Generator().manual_seed(n)) for n in (1, 33, 64)}


def weight(like: Tensor, n: int = 33) -> Tensor:
    return WEIGHTS[n].to(like)


def into(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    return function(*args, out=torch.empty(0, dtype=args[-1].dtype, device=args[-1].device))


def in_place(x: Tensor) -> Tensor:
    y = torch.ones(x.shape[0], 64, dtype=x.dtype, device=x.device)
    return y.addmm_(x, weight(x, 64).t(), beta=0.5)


def masked_sum(x: Tensor) -> Tensor:
    return x.unflatten(1, (5, 8)).sum((1,), dtype=torch.float64)


# Of rows of 40 columns.
FUNCTIONS: dict[str, Function] = {
    "linear": lambda x: F.linear(x, weight(x)),
    "linear with a bias": lambda x: F.linear(x, weight(x), weight(x)[:, 0]),
    "linear of 1 column": lambda x: F.linear(x, weight(x, 1)),
    "linear in 3 dimensions": lambda x: F.linear(x.unsqueeze(1), weight(x, 64)).squeeze(1),
    "mm into": lambda x: into(torch.mm, x, weight(x).t()),
    "mm of rows": lambda x: x @ weight(x).t().contiguous(),
    "addmm in place": in_place,
    "mv": lambda x: torch.mv(x, weight(x)[0]),
    "addmv": lambda x: torch.addmv(x[:, 0], x, weight(x)[0], beta=0.5, alpha=2),
    "bmm of rows": lambda x: torch.bmm(x.expand(2, *x.shape), weight(x).mT.expand(2, 40, 33))[1],
    "bmm of batches": lambda x: torch.bmm(
        x.unflatten(1, (5, 8)), weight(x)[:8, :7].expand(len(x), 8, 7)
    ),
    "baddbmm": lambda x: torch.baddbmm(x[:, None, :3], x[:, None], weight(x, 64)[:3].t()[None]
        .expand(len(x), 40, 3)),
    "grouped mm": lambda x: F.grouped_mm(
        x.bfloat16(), weight(x, 64).bfloat16().t()[None].contiguous(),
        offs=torch.tensor([len(x)], dtype=torch.int32, device=x.device),
    ),
    "sum": lambda x: x.sum(-1),
    "sum of an axis within": masked_sum,
    "mean": lambda x: x.mean(-1, keepdim=True),
    "var": lambda x: x.var(-1),
    "norm": lambda x: x.norm(dim=-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "cumsum": lambda x: x.cumsum(-1),
    "softmax": lambda x: x.softmax(-1),
    "softmax in float32": lambda x: x.softmax(-1, dtype=torch.float32),
    "log_softmax of odd columns": lambda x: x[:, :39].log_softmax(-1),
    "sum of odd columns": lambda x: x[:, :39].sum(-1),
    "layer_norm": lambda x: F.layer_norm(x, (40,)),
    "layer_norm of two axes": lambda x: F.layer_norm(
        x.unflatten(1, (5, 8)), (5, 8), weight(x, 64)[:5, :8], weight(x, 64)[5:10, :8]
    ).flatten(1),
    "rms_norm": lambda x: F.rms_norm(x, (40,)),
    "silu": F.silu,
    "pow": lambda x: x.abs() ** 1.3,
    "complex": lambda x: torch.view_as_real(
        torch.complex(x[:, ::2].float(), x[:, 1::2].float()) * (0.3 + 0.7j)
    ).flatten(1),
    "a number": lambda x: 2 / (x * x + 3),
    "elementwise in place": lambda x: x.clone().sigmoid_(),
}  # fmt: skip


PRODUCTS = list(FUNCTIONS)[: list(FUNCTIONS).index("sum")]


def with_gradient(function: Function) -> Function:
    """Return a function of the gradient of x, for a gradient of the result that each row has."""

    def gradient(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        y = function(x)
        (dx,) = torch.autograd.grad(y.float().square().sum(), x)
        return dx

    return gradient


@pytest.mark.device_kernels
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_rows_have_the_same_bits(name: str, backward: bool) -> None:
    function = with_gradient(FUNCTIONS[name]) if backward else FUNCTIONS[name]
    # A transposed matrix times another is taken for a sum over rows, or refused.
    layouts = ("contiguous", "sliced", *(() if name in PRODUCTS else ("transposed",)))
    if backward and ("into" in name or "cumsum" in name):
        pytest.skip("out= has no gradient, and the gradient of cumsum flips a tensor's strides")

    @given(
        count=st.sampled_from((1, 2, 17, 64, 65, 130)), seed=st.integers(0, 99),
        dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
        layout=st.sampled_from(layouts),
    )  # fmt: skip
    def check(count: int, seed: int, dtype: torch.dtype, layout: str) -> None:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(200, 40, generator=generator).to(DEVICE, dtype)
        rows = torch.randperm(200, generator=generator)[:count].to(DEVICE)
        with liger_ops.invariant():
            whole = function(x)
            assert torch.equal(function(laid_out(x[rows], layout)), whole[rows])
        torch.testing.assert_close(whole, function(x), atol=0.05, rtol=0.05)

    check()


@pytest.mark.device_kernels
def test_attention_does_not_depend_on_what_follows_or_on_the_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(3, heads, 150, 16, generator=generator).to(DEVICE).requires_grad_()
        for heads in (4, 4, 4)
    )
    dy = torch.randn(3, 4, 150, 16, generator=generator).to(DEVICE)
    with liger_ops.invariant():
        whole = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        gradients = torch.autograd.grad(whole, (q, k, v), dy)
        for part in (slice(1, 2), slice(1, 3)):
            y = F.scaled_dot_product_attention(q[part], k[part], v[part], is_causal=True)
            assert torch.equal(y, whole[part])
            for dx, expected in zip(
                torch.autograd.grad(y, (q, k, v), dy[part]), gradients, strict=True
            ):
                assert torch.equal(dx[part], expected[part])
        first = (x[:, :, :70] for x in (q, k, v))
        assert torch.equal(F.scaled_dot_product_attention(*first, is_causal=True), whole[:, :, :70])
        last = F.scaled_dot_product_attention(q[:, :, -1:], k, v)
        assert torch.equal(last, whole[:, :, -1:])
    torch.testing.assert_close(
        whole, F.scaled_dot_product_attention(q, k, v, is_causal=True), atol=1e-4, rtol=1e-4
    )


@pytest.mark.device_kernels
@pytest.mark.parametrize("queries, keys", [(3, 70), (70, 3)])
def test_attention_to_other_keys_than_the_queries(queries: int, keys: int) -> None:
    sizes = (queries, keys, keys)
    operands = [torch.randn(2, 4, n, 16).to(DEVICE).requires_grad_() for n in sizes]
    dy = torch.randn(2, 4, queries, 16).to(DEVICE)
    with liger_ops.invariant():
        y = F.scaled_dot_product_attention(*operands)
        gradients = torch.autograd.grad(y, operands, dy)
    expected = F.scaled_dot_product_attention(*operands)
    torch.testing.assert_close(y, expected, atol=1e-4, rtol=1e-4)
    of_expected = torch.autograd.grad(expected, operands, dy)
    torch.testing.assert_close(gradients, of_expected, atol=1e-4, rtol=1e-4)


@pytest.mark.device_kernels
@pytest.mark.parametrize("laid", ["heads before tokens", "tokens before heads"])
def test_attention_can_be_viewed_as_that_of_pytorch(laid: str) -> None:
    q, k = (torch.randn(2, 4, n, 16, device=DEVICE) for n in (3, 70))
    if laid == "tokens before heads":
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
    with liger_ops.invariant():
        y = F.scaled_dot_product_attention(q, k, k)
    assert y.stride() == F.scaled_dot_product_attention(q, k, k).stride()


def product_of_a_transposed_matrix() -> Tensor:
    x = torch.randn(8, 5, device=DEVICE, requires_grad=True)
    return F.linear(x.t(), torch.randn(3, 8, device=DEVICE))


def attention_module() -> torch.nn.Module:
    # In a model that is evaluated, PyTorch calls an operator for the whole module.
    module = torch.nn.MultiheadAttention(8, 2, batch_first=True, device=DEVICE)
    return module.eval().requires_grad_(False)


REFUSED: dict[str, Callable[[], object]] = {
    "the gradient of a transposed matrix": product_of_a_transposed_matrix,
    "scaled_dot_product_attention": lambda: F.scaled_dot_product_attention(
        *torch.randn(3, 1, 2, 4, 8, device=DEVICE),
        attn_mask=torch.ones(4, 4, dtype=torch.bool, device=DEVICE),
    ),
    "scale must be a number above 0": lambda: F.scaled_dot_product_attention(
        *torch.randn(3, 1, 2, 4, 8, device=DEVICE), scale=-1.0
    ),
    "flex_attention": lambda: flex_attention(
        *torch.randn(3, 1, 2, 4, 16, device=DEVICE), score_mod=lambda s, b, h, q, k: s + q * k
    ),
    "_native_multi_head_attention": lambda: attention_module()(
        *[torch.randn(2, 4, 8, device=DEVICE)] * 3, need_weights=False
    ),
    "scaled_dot_product_attention is covered": lambda: F.scaled_dot_product_attention(
        torch.randn(1, 2, 2, 8, device=DEVICE),
        *torch.randn(2, 1, 2, 4, 8, device=DEVICE),
        is_causal=True,
    ),
    "convolution": lambda: F.conv1d(
        torch.randn(1, 4, 8, device=DEVICE), torch.randn(4, 4, 2, device=DEVICE)
    ),
    "native_batch_norm": lambda: F.batch_norm(
        torch.randn(3, 4, device=DEVICE), None, None, training=True
    ),
}


@pytest.mark.device_kernels
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_covered_is_refused_by_name(name: str) -> None:
    with liger_ops.invariant(), pytest.raises(NotInvariantError, match=name):
        REFUSED[name]()
    REFUSED[name]()


def test_a_way_that_does_not_hold_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function whose rows depend on how many there are needs blocks; one whose rows depend on
    their place has no way."""
    from liger_ops.invariance.rows import as_it_is, compute, more_rows

    x = torch.randn(10, 7)
    calls = []

    def by_count(x: Tensor) -> tuple[Tensor]:
        calls.append(len(x))
        return (x * len(x),)

    (y,) = compute("by count", (), [by_count], x, by=(as_it_is, more_rows, blocks))
    assert calls[-1] == 64
    torch.testing.assert_close(y, x * 64)

    def by_place(x: Tensor) -> tuple[Tensor]:
        return (x * torch.arange(len(x)).unsqueeze(1),)

    with pytest.raises(NotInvariantError, match=r"by place of \(10, 7\) torch.float32 on cpu"):
        compute("by place", (), [by_place], x)
    # The second of two equal functions is taken where the first does not hold.
    (z,) = compute("either", (), [by_place, lambda x: (x * 2,)], x)
    torch.testing.assert_close(z, x * 2)
    for key in [key for key in _ways if key[0] in ("by count", "either")]:
        monkeypatch.delitem(_ways, key)


@pytest.mark.device_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("M", "N", "K"), [(1, 1, 1), (70, 33, 40), (130, 200, 129)])
@pytest.mark.usefixtures("without_tf32")
def test_own_product(dtype: torch.dtype, M: int, N: int, K: int) -> None:
    if DEVICE == "npu":
        pytest.skip("the kernel is for GPUs")
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(2, M, K, generator=generator).to(DEVICE, dtype)
    b = torch.randn(2, K, N, generator=generator).to(DEVICE, dtype)
    exact = a.double() @ b.double()
    product = importlib.import_module("liger_ops.lowering.cuda.product").product
    for right in (b, b.mT.contiguous().mT):
        y = product(a, right, torch.float32)
        torch.testing.assert_close(y.double(), exact, atol=K * 1e-6, rtol=1e-5)
        assert product(a, right).dtype is dtype
        # The interpreter computes a tile's product by NumPy, where a row's place matters.
        for rows in (slice(0, 1), slice(M // 3, None)) if DEVICE != "cpu" else ():
            assert torch.equal(
                product(a[1:, rows].contiguous(), right[1:], torch.float32), y[1:, rows]
            )


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "linear_cross_entropy": liger_ops.linear_cross_entropy,
    "linear_log_prob": lambda x, weight, words: liger_ops.linear_log_prob(x, weight, words)[0],
    "cross_entropy": lambda x, weight, words: liger_ops.cross_entropy(x @ weight.t(), words),
    "embedding": lambda x, weight, words: liger_ops.embedding(weight, words) * x,
}


@pytest.mark.device_kernels
@pytest.mark.parametrize("name", LOSSES)
def test_deterministic_algorithms_refuse_no_loss_and_change_none(name: str) -> None:
    x, weight = (torch.randn(n, 16, device=DEVICE).requires_grad_() for n in (40, 300))
    words = torch.randint(300, (40,), device=DEVICE)

    def results() -> tuple[Tensor, ...]:
        loss = LOSSES[name](x, weight, words)
        return (loss.detach(), *torch.autograd.grad(loss.sum(), (x, weight)))

    expected = results()
    torch.use_deterministic_algorithms(True)
    try:
        found = results()
    finally:
        torch.use_deterministic_algorithms(False)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
