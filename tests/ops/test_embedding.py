"""embedding against float64 truth, and against torch.nn.functional.embedding."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import liger_ops
from liger_ops import library
from op_table import OPS
from op_under_test import DEVICE, EVERY_FOLDER

OP = OPS["embedding"]


@pytest.mark.device_kernels
@EVERY_FOLDER
@pytest.mark.parametrize("padding_idx", (None, 1))
def test_a_word_that_occurs_very_often(folder: str, padding_idx: int | None) -> None:
    """Its sums are those of many chunks."""
    generator = torch.Generator().manual_seed(0)
    indices = torch.randint(4, (603,), generator=generator)
    indices[torch.rand(indices.shape, generator=generator) < 0.9] = 1
    # Exact in float32: bfloat16 numbers of few bits.
    dy = torch.randint(-8, 9, (*indices.shape, 3), generator=generator).bfloat16()
    expected = torch.zeros(5, 3, dtype=torch.float64).index_add_(0, indices, dy.double())
    if padding_idx is not None:
        expected[padding_idx] = 0
    kernel = library.OPS["embedding_backward"].kernels[folder]
    dweight = kernel(dy.to(DEVICE), indices.to(DEVICE), 5, padding_idx)
    assert torch.equal(dweight.cpu(), expected.bfloat16())


@pytest.mark.device_kernels
@EVERY_FOLDER
def test_rows_of_padding_are_not_read(folder: str) -> None:
    indices = torch.tensor([1, 0, 1, 2, 1], device=DEVICE)
    dy = torch.ones(5, 4, device=DEVICE)
    dy[indices == 1] = float("nan")
    for backward in (
        library.OPS["embedding_backward"].kernels[folder],
        library.OPS["embedding_backward"].definition,
    ):
        dweight = backward(dy, indices, 4, 1)
        assert dweight.tolist() == [[1.0] * 4, [0.0] * 4, [1.0] * 4, [0.0] * 4]


@pytest.mark.device_kernels
@EVERY_FOLDER
def test_indices_outside_of_the_table_have_no_gradient(folder: str) -> None:
    """The forward refuses them; the backward alone writes to no other memory."""
    indices = torch.tensor([5, -1, 1, 7], device=DEVICE)
    dy = torch.ones(4, 3, device=DEVICE)
    dweight = library.OPS["embedding_backward"].kernels[folder](dy, indices, 5, None)
    assert dweight.sum() == dweight[1].sum() == 3


@EVERY_FOLDER
@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU's assertion ends the process")
def test_an_index_outside_of_the_table_is_refused(folder: str) -> None:
    weight = torch.ones(3, 2)
    for call in (liger_ops.embedding, library.OPS["embedding"].kernels[folder]):
        for index in (3, -1):
            with pytest.raises((IndexError, RuntimeError), match="out of range"):
                call(weight, torch.tensor([index]))


@pytest.mark.parametrize("padding_idx", (None, 2, -3))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_is_torchs(dtype: torch.dtype, padding_idx: int | None) -> None:
    torch.manual_seed(0)
    indices = torch.randint(9, (4, 11))
    ours = torch.randn(9, 6).to(dtype).requires_grad_()
    # PyTorch's sums on a CPU are rounded to bfloat16 at every row.
    theirs = ours.detach().float().requires_grad_()
    y = liger_ops.embedding(ours, indices, padding_idx)
    expected = F.embedding(indices, theirs, padding_idx)
    assert torch.equal(y.float(), expected)
    dy = torch.randn_like(y)
    y.backward(dy)
    expected.backward(dy.float())
    torch.testing.assert_close(ours.grad, theirs.grad.to(dtype))


def test_the_tangent_of_padding_is_zero() -> None:
    """As its gradient, in both modes of differentiation."""
    weight, indices = torch.randn(4, 3), torch.tensor([2, 1, 2])
    _, tangent = torch.func.jvp(
        lambda w: liger_ops.embedding(w, indices, 2), (weight,), (torch.ones(4, 3),)
    )
    assert tangent.tolist() == [[0.0] * 3, [1.0] * 3, [0.0] * 3]


def test_the_weight_may_change_before_the_backward() -> None:
    """Only the indices are saved."""
    weight = torch.randn(4, 3, requires_grad=True)
    y = liger_ops.embedding(weight, torch.tensor([2, 1]))
    with torch.no_grad():
        weight.mul_(2)
    y.sum().backward()
    assert weight.grad.sum() == 6


def test_module_is_torchs() -> None:
    torch.manual_seed(0)
    module = liger_ops.nn.Embedding(7, 4, padding_idx=2)
    theirs = torch.nn.Embedding(7, 4, 2)
    theirs.load_state_dict(module.state_dict())
    indices = torch.randint(7, (3, 5))
    module(indices).square().sum().backward()
    theirs(indices).square().sum().backward()
    torch.testing.assert_close(module.weight.grad, theirs.weight.grad)
    assert not module.weight[2].any() and repr(module) == "Embedding(7, 4, padding_idx=2)"
    made = liger_ops.nn.Embedding.from_pretrained(torch.ones(3, 2))
    assert isinstance(made, liger_ops.nn.Embedding) and not made.weight.requires_grad
    assert torch.equal(made(torch.tensor(1)), torch.ones(2))
    for options, message in (
        ({"max_norm": 1.0}, "Embedding: max_norm must be None, got 1.0"),
        ({"scale_grad_by_freq": True}, "Embedding: scale_grad_by_freq must be False, got True"),
        ({"sparse": True}, "Embedding: sparse must be False, got True"),
    ):
        with pytest.raises(ValueError, match=f"^{message}$"):
            liger_ops.nn.Embedding(7, 4, **options)


def test_the_backward_refuses_a_gradient_of_other_rows() -> None:
    case = OP.case(shape=(3, 2), dtype=torch.float32)
    dy, *others = OP.backward_args(case, OP.tensors(case))
    with pytest.raises(
        ValueError, match="^embedding_backward: dy must have the shape of the forward's y"
    ):
        torch.ops.liger.embedding_backward(dy[:2], *others)
