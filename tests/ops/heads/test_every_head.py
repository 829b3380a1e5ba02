"""Rules that all losses of hidden states and a head follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from graphs import Recorder, liger_ops_of
from head_bounds import implementation_of
from head_calls import Calls
from liger_ops import library
from linear_cross_entropy_cases import LORA
from op_table import OPS
from op_under_test import EVERY_IMPLEMENTATION, OpUnderTest

HEADS = [op for op in OPS.values() if op.name.startswith("linear_")]


@pytest.mark.device_kernels
@EVERY_IMPLEMENTATION
@pytest.mark.parametrize("op", HEADS, ids=repr)
@pytest.mark.parametrize("frozen", (False, True))
def test_the_logits_are_never_whole_in_memory(
    implementation: str, op: OpUnderTest, frozen: bool
) -> None:
    """Neither in the forward nor in the backward. With a frozen head and a LoRA, neither the
    weight's gradient nor the adapted weight is."""
    fields: dict[str, Any] = {"shape": (64,), "D": 4, "E": 4, "dtype": torch.bfloat16}
    if frozen:
        fields = {"shape": (8,), "D": 16, "E": 16, "dtype": torch.float32, "bias": False}
        fields |= {"rank": 2, "teacher_rank": 2, "mask": (True, False, False, True, True)}
    fields |= {"V": 64, "W": 64, "reduction": op.form if op.form in ("mean", "none") else "mean"}
    # A chunk of tokens has the logits of both heads.
    heads = 2 if hasattr(op.case_type, "W") else 1
    given = {name: value for name, value in fields.items() if hasattr(op.case_type, name)}
    case = op.case(**given, chunk_bytes=heads * 512)
    tensors = op.tensors(case)
    for backward, args in (
        (False, op.forward_args(case, tensors)),
        (True, op.backward_args(case, tensors)),
    ):
        record = library.OPS[op.backward_name if backward else op.name]
        with Calls() as calls:
            outputs = implementation_of(record, implementation)(*args)
        # The definition has int64 and float32 tensors of a chunk.
        assert 512 <= calls.largest <= 512 * (2 if frozen else 4)
        products = [name for name, _ in calls.calls if name in ("aten::mm", "aten::addmm")]
        assert len(products) >= (4 if frozen else 16)
        results = zip(record.overload._schema.returns, outputs, strict=True)
        found = {result.name[1:]: y is not None for result, y in results}
        for name, wanted in zip(("x", "weight", "bias", *LORA), case.mask, strict=True):
            in_forward = case.reduction != "none" and name in found
            assert found.get(name, False) == (wanted and (backward or in_forward)), name


def log_prob(x: Tensor, weight: Tensor, bias: Tensor, target: Tensor, teacher: Tensor) -> Tensor:
    log_prob, entropy = torch.ops.liger.linear_log_prob(
        x[target > 0], weight, target[target > 0], bias, 0.7, chunk_bytes=60
    )
    return log_prob.exp().sum() + entropy.square().sum()


def logits(x: Tensor, weight: Tensor, bias: Tensor, target: Tensor, teacher: Tensor) -> Tensor:
    kept = target > 0
    found = torch.ops.liger.log_prob((x @ weight.t() + bias)[kept], target[kept], 0.7)
    return found[0].exp().sum() + found[1].square().sum()


def divergence(x: Tensor, weight: Tensor, bias: Tensor, target: Tensor, teacher: Tensor) -> Tensor:
    return torch.ops.liger.linear_divergence(
        x[target > 0], weight, student_bias=bias, teacher_logits=teacher[target > 0],
        target=target[target > 0], hard_weight=0.5, chunk_bytes=60,
    )[0] * 2  # fmt: skip


def words(x: Tensor, weight: Tensor, bias: Tensor, target: Tensor, teacher: Tensor) -> Tensor:
    chosen, first = torch.ops.liger.linear_top_k(x[target > 0], weight, 3, bias, chunk_bytes=60)
    again, _ = torch.ops.liger.linear_log_prob(x[target > 0], weight, chosen, bias, 0.7)
    return first.exp().sum() + again.exp().sum()


def top_k(x: Tensor, weight: Tensor, bias: Tensor, target: Tensor, teacher: Tensor) -> Tensor:
    log_p, ids = teacher[:, :7].log_softmax(-1).topk(3)
    kept = target > 0
    return torch.ops.liger.linear_top_k_divergence(
        x[kept], weight, ids[target > 0], log_p[kept], bias, target[kept], chunk_bytes=60
    ).exp().sum()  # fmt: skip


def centred(x: Tensor, weight: Tensor, bias: Tensor, target: Tensor, teacher: Tensor) -> Tensor:
    log_q, words = teacher[:, :7].log_softmax(-1).topk(3)
    kept = target > 0
    loss, log_prob = torch.ops.liger.linear_score_centering(
        x[kept], weight, target[kept], words[kept], log_q[kept], teacher[kept, 7], bias,
        chunk_bytes=60,
    )  # fmt: skip
    return loss + log_prob.exp().sum()


@pytest.mark.parametrize(
    ("model", "names", "mask"),
    (
        *((log_prob, ("linear_log_prob",), mask)
          for mask in ((True, True, True), (True, False, False), (False, True, False))),
        (logits, ("log_prob",), (True, True, True)),
        (divergence, ("linear_divergence",), (True, True, True)),
        (words, ("linear_top_k", "linear_log_prob"), (True, True, True)),
        (centred, ("linear_score_centering",), (True, True, True)),
        (top_k, ("linear_top_k_divergence", "divergence"), (True, True, True)),
    ),
)  # fmt: skip
def test_compiled_once_for_unbacked_sizes(
    model: Callable[..., Tensor], names: tuple[str, ...], mask: tuple[bool, ...]
) -> None:
    """`x[mask]` has a size that only the data gives; each op is in the graph once."""
    recorder = Recorder()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=recorder.backend())
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for rows in (4, 6):
            head = torch.randn(rows, 5), torch.randn(7, 5), torch.randn(7)
            leaves = [t.requires_grad_() for t, wanted in zip(head, mask, strict=True) if wanted]
            args = (*head, torch.arange(rows), torch.randn(rows, 8))
            values = [f(*args) for f in (compiled, model)]
            torch.testing.assert_close(*values)
            torch.testing.assert_close(*(torch.autograd.grad(value, leaves) for value in values))
    assert liger_ops_of(recorder.forwards) == {f"{name}_forward": 1 for name in names}
    assert liger_ops_of(recorder.backwards) == {f"{name}_backward": 1 for name in names}


# linear_top_k_divergence is given a teacher's log-probabilities, too.
PUBLIC = pytest.mark.parametrize(
    "op", [op for op in HEADS if op.base != "linear_top_k_divergence"], ids=repr
)


@PUBLIC
def test_opcheck(op: OpUnderTest) -> None:
    """opcheck holds for the composed op and for a backward that is given gradients."""
    composed = getattr(torch.ops.liger, op.base).default
    if op.base != "linear_top_k":
        # PyTorch's check adds the other results to the first, which are words there.
        torch.library.opcheck(composed, (), op.public_arguments(op.sample(torch.float32)))
    case = op.sample(torch.float32)
    tensors = op.tensors(case)
    arguments = [a.name for a in op.overload(backward=True)._schema.arguments]
    computed = {
        name: torch.ones_like(tensors[of])
        for of in op.gradients_of
        if (name := f"d{of.removeprefix('student_')}") in arguments and case.reduction != "none"
    }
    given = dict(zip(arguments, op.backward_args(case, tensors), strict=True)) | computed
    torch.library.opcheck(op.overload(backward=True), tuple(given.values()))
