"""neighborhood_attention's kernels of both devices against float64 truth, its windows, and its
composed op."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

import liger_ops
import op_checks
import strategies
from liger_ops import library
from neighborhood_cases import INPUTS
from op_table import OPS
from op_under_test import EVERY_FOLDER, FOLDERS

OP = OPS["neighborhood_attention_forward-line"]


def keys_of(i: int, length: int, size: int, dilation: int, causal: bool, border: str) -> set[int]:
    """The keys of query i, by enumeration."""
    if border == "clipped" and not causal:
        half = size // 2 * dilation
        return {j for j in range(length) if abs(j - i) <= half and (j - i) % dilation == 0}
    peers = [j for j in range(length) if j % dilation == i % dilation]
    at = peers.index(i)
    if causal:
        return set(peers[max(0, at - size + 1) : at + 1])
    first = next(
        s for s in range(len(peers)) if s + size >= min(len(peers), at + (size - 1) // 2 + 1)
    )
    return set(peers[min(first, len(peers) - size) :][:size])


def mask_of(case: Any) -> Tensor:
    """Which key each query attends to, of the flattened positions."""
    lengths = case.shape[2:-1]
    mask = torch.ones(1, 1, dtype=torch.bool)
    for length, *options in zip(
        lengths, case.kernel_size, case.dilation, case.is_causal, strict=True
    ):
        line = torch.zeros(length, length, dtype=torch.bool)
        for i in range(length):
            line[i, list(keys_of(i, length, *options, case.border))] = True
        mask = torch.kron(mask, line)
    return mask


@settings(max_examples=settings().max_examples // 2)
@given(case=strategies.cases(OP))
def test_the_definition_is_attention_with_a_mask(case: Any) -> None:
    tensors = OP.tensors(case)
    leaves = [tensors[name].double().requires_grad_() for name in INPUTS]
    ours = liger_ops.neighborhood_attention(*leaves, *OP.options(case))
    query, key, value = (x.flatten(2, -2) for x in leaves)
    groups = case.shape[1] // case.key_heads
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    mask = mask_of(case).to(query.device)
    theirs = F.scaled_dot_product_attention(query, key, value, mask, scale=case.softmax_scale)
    theirs = theirs.view(case.shape)
    weight = torch.randn_like(ours)
    grads = [torch.autograd.grad(y, leaves, weight) for y in (ours, theirs)]
    for a, b in zip((ours, *grads[0]), (theirs, *grads[1]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.device_kernels
@EVERY_FOLDER
def test_a_wide_head_by_the_host_codes_own_plan(folder: str) -> None:
    """With windows of more than a tile."""
    case = OP.case(shape=(1, 2, 80, 160), dtype=torch.bfloat16, kernel_size=(61,), border="shifted")
    op_checks.assert_forward_matches_truth(OP, folder, case)
    op_checks.assert_backward_matches_truth(OP, folder, case)


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that an operator makes, in float32 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, Tensor):
                self.elements = max(self.elements, value.untyped_storage().nbytes() // 4)
        return result


def largest_tensor(folder: str | None, length: int) -> int:
    """Numbers of the largest float32 tensor, forward and backward: 8 heads of 64, window 129."""
    forward, backward = (
        library.OPS[f"neighborhood_attention_{way}"] for way in ("forward", "backward")
    )
    shape, options = (1, 8, length, 64), ([129], [1], [0], "clipped", None)
    with FakeTensorMode(), Largest() as seen:
        query, key, value, dy = (torch.empty(shape) for _ in range(4))
        run = forward.custom_op._opoverload if folder is None else forward.kernels[folder]
        y, lse = run(query, key, value, *options)
        run = backward.custom_op._opoverload if folder is None else backward.kernels[folder]
        run(dy, lse, query, key, value, y, lse, *options, [True] * 3)
    return seen.elements


def test_memory_grows_with_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ops' fakes and the kernels' host code allocate nothing larger than query, at the
    32768 tokens at which scores of all pairs would be 8.6e9 numbers."""
    for folder in (None, *FOLDERS):
        if folder is not None:
            module = f"liger_ops.lowering.{folder}.attention.neighborhood_attention.launch"
            monkeypatch.setattr(module, lambda *args, **constants: None)
        for length in (4096, 32768):
            assert largest_tensor(folder, length) == 8 * length * 64


def test_the_definition_keeps_scores_of_windows_alone() -> None:
    length, size = 600, 9
    query = torch.randn(1, 2, length, 4)
    with Largest() as seen:
        y, lse = library.OPS["neighborhood_attention_forward"].definition(query, query, query, size)
        library.OPS["neighborhood_attention_backward"].definition(
            y, lse, query, query, query, y, lse, size, 1, False, "clipped", None, [True] * 3
        )
    assert seen.elements == 2 * length * size


@pytest.mark.parametrize("layout", ((0, 1, 2, 3), (0, 2, 1, 3)))
def test_results_have_the_layout_of_the_inputs(layout: tuple[int, ...]) -> None:
    query, key, value = (torch.randn(2, 4, 4, 8).permute(layout).requires_grad_() for _ in range(3))
    y = liger_ops.neighborhood_attention(query, key, value, 3)
    assert y.stride() == query.stride()
    y.sum().backward()
    assert all(x.grad.stride() == x.stride() for x in (query, key, value))


def test_results_over_parts_of_the_keys_merge() -> None:
    """By lse, with gradients: two windows of one key each are the causal window of both."""
    query, key, value = (torch.randn(1, 1, 6, 4, dtype=torch.float64) for _ in range(3))
    leaves = [x.requires_grad_() for x in (query, key, value)]
    whole = liger_ops.neighborhood_attention(*leaves, 2, is_causal=True)
    own, own_lse = liger_ops.neighborhood_attention_forward(*leaves, 1)
    before, before_lse = (
        x[:, :, :5]
        for x in liger_ops.neighborhood_attention_forward(
            torch.cat((query[:, :, 1:], query[:, :, :1]), 2), key, value, 1
        )
    )
    share = torch.sigmoid(own_lse[:, :, 1:] - before_lse).unsqueeze(-1)
    merged = torch.cat((own[:, :, :1], share * own[:, :, 1:] + (1 - share) * before), 2)
    torch.testing.assert_close(merged, whole)
    weight = torch.randn_like(whole)
    for a, b in zip(
        *(torch.autograd.grad(y, leaves, weight) for y in (merged, whole)), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_one_value_is_for_both_dimensions() -> None:
    query = torch.randn(1, 2, 6, 7, 4)
    for one, two in (((3, 2, True), ([3, 3], [2, 2], [True, True])), ((3,), ([3, 3],))):
        results = [liger_ops.neighborhood_attention(query, query, query, *o) for o in (one, two)]
        assert torch.equal(*results)


def test_flops_are_those_of_attention_where_every_window_is_whole() -> None:
    q, k = torch.randn(2, 4, 7, 8, requires_grad=True), torch.randn(2, 2, 7, 8, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        liger_ops.neighborhood_attention(q, k, k, 7).sum().backward()
    dense = sdpa_flop_count(q.shape, k.shape, k.shape)
    assert counter.get_total_flops() == dense + 5 * dense // 2
