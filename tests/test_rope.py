"""rope against float64 truth, and against the code that people replace with it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as cohere_rope
from transformers.models.glm4.modeling_glm4 import apply_rotary_pos_emb as glm4_rope
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama_rope

import liger_ops
import op_checks
import strategies
from graphs import Recorder
from op_table import OPS
from op_under_test import FOLDERS, laid_out
from ropes import RopeCase

OP = OPS["rope"]
EVERY_FOLDER = pytest.mark.parametrize("folder", FOLDERS)


@pytest.mark.device_kernels
@EVERY_FOLDER
@given(case=strategies.ropes())
def test_forward_matches_truth(folder: str, case: RopeCase) -> None:
    op_checks.assert_forward_matches_truth(OP, folder, case)


@pytest.mark.device_kernels
@EVERY_FOLDER
@given(case=strategies.ropes())
def test_backward_matches_truth(folder: str, case: RopeCase) -> None:
    op_checks.assert_backward_matches_truth(OP, folder, case)


@pytest.mark.device_kernels
@EVERY_FOLDER
@settings(max_examples=settings().max_examples // 3)
@given(case=strategies.ropes(tables=("none", "one")).filter(strategies.has_rows))
def test_properties(folder: str, case: RopeCase) -> None:
    op_checks.assert_deterministic(OP, folder, case)
    op_checks.assert_tile_does_not_matter(OP, folder, case)
    op_checks.assert_rows_are_independent(OP, folder, case)


@pytest.mark.device_kernels
@EVERY_FOLDER
@pytest.mark.parametrize("interleaved", (False, True))
@pytest.mark.parametrize(
    ("shape", "rotary"),
    (((2, 16, 9, 128), 128), ((1, 9, 17, 96), 24), ((1, 2, 3, 6002), 6002), ((1, 1, 2, 601), 2)),
    ids=("llama", "partial", "wide", "mostly-copied"),
)
def test_by_the_host_codes_own_plan(
    folder: str, shape: tuple[int, ...], rotary: int, interleaved: bool
) -> None:
    case = RopeCase(
        shape=shape,
        dtype=torch.bfloat16,
        k_heads=2,
        tables="one",
        rotary=rotary,
        table_dtype=torch.bfloat16,
        layout="model",
        k_layout="model",
        interleaved=interleaved,
    )
    op_checks.assert_forward_matches_truth(OP, folder, case)
    op_checks.assert_backward_matches_truth(OP, folder, case)


@pytest.mark.device_kernels
@EVERY_FOLDER
def test_what_is_not_rotated_is_copied(folder: str) -> None:
    """Bit for bit, infinities too."""
    case = RopeCase(shape=(2, 3, 5, 20), dtype=torch.bfloat16, rotary=6, layout="model")
    q, k, cos, sin, _ = OP.forward_args(case, OP.tensors(case))
    q[..., 6:] = torch.linspace(-torch.inf, 0, 14)
    for backward, options in ((False, ()), (True, ([True, True],))):
        args = (q, k, cos, sin, False, *options)
        outputs = op_checks.run_kernel(OP, folder, backward, case, args)
        for output, x in zip(outputs, (q, k), strict=True):
            assert output is not None
            assert torch.equal(output[..., 6:].view(torch.int16), x[..., 6:].view(torch.int16))


@pytest.mark.device_kernels
@EVERY_FOLDER
@pytest.mark.parametrize("order", ((0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (2, 1, 0, 3)))
def test_outputs_have_the_layout_of_the_inputs(folder: str, order: tuple[int, ...]) -> None:
    """Contiguous, a model's, and sequence-first."""
    case = RopeCase(shape=(2, 4, 3, 16), dtype=torch.float32, k_heads=2, rotary=16)
    tensors = OP.tensors(case)
    inverse = [order.index(dim) for dim in range(4)]
    for name in ("q", "k", "dy", "ds"):
        tensors[name] = tensors[name].permute(order).contiguous().permute(inverse)
    for backward, args in (
        (False, OP.forward_args(case, tensors)),
        (True, OP.backward_args(case, tensors)),
    ):
        definition = liger_ops.library.OPS[OP.backward_name if backward else OP.name].definition
        for outputs in (op_checks.run_kernel(OP, folder, backward, case, args), definition(*args)):
            for output, x in zip(outputs, args[:2], strict=True):
                assert output.stride() == x.stride() == torch.empty_like(x).stride()


def rotary_tables(dtype: torch.dtype, interleaved: bool = False) -> tuple[torch.Tensor, ...]:
    positions = torch.arange(5.0) + torch.tensor([[0.0], [7.0]])
    angles = positions[..., None] / 10000 ** (torch.arange(8) / 8)
    angles = angles.repeat_interleave(2, -1) if interleaved else torch.cat((angles, angles), -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def heads(dtype: torch.dtype, D: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(
        laid_out(torch.randn(2, n, 5, D, generator=generator).to(dtype), "model") for n in (4, 2)
    )


def assert_agrees(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Transformers rounds both products and their sum; we once."""
    unit = torch.finfo(ours.dtype).eps * theirs.abs().max().item()
    assert ours.dtype is theirs.dtype
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2 * unit)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_agrees_with_transformers(dtype: torch.dtype) -> None:
    """Llama's, Cohere's, and GLM4's partial rotation, forward and gradient."""
    half, interleaved = rotary_tables(dtype), rotary_tables(dtype, interleaved=True)
    for theirs, tables, their_tables, options, D in (
        (llama_rope, half, half, (), 16),
        (cohere_rope, interleaved, interleaved, (True,), 16),
        (glm4_rope, interleaved, half, (True,), 24),
    ):
        q, k = (x.requires_grad_() for x in heads(dtype, D))
        outputs = liger_ops.rope(q, k, *tables, *options)
        expected = theirs(q, k, *their_tables)
        weights = [torch.randn_like(output) for output in outputs]
        grads = torch.autograd.grad(outputs, (q, k), weights)
        expected_grads = torch.autograd.grad(expected, (q, k), weights)
        for a, b in zip((*outputs, *grads), (*expected, *expected_grads), strict=True):
            assert_agrees(a, b)


def test_tables_are_shared_or_of_the_batch() -> None:
    q, k = heads(torch.float64)
    cos, sin = rotary_tables(torch.float64)
    shared = [liger_ops.rope(q, k, cos[0][index], sin[0][index]) for index in (..., None)]
    expanded = liger_ops.rope(q, k, cos[:1].expand(2, -1, -1), sin[:1].expand(2, -1, -1))
    for outputs in shared:
        for a, b in zip(outputs, expanded, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("tables", ("none", "one", "batch"))
@pytest.mark.parametrize("interleaved", (False, True))
def test_gradients_of_learned_tables(tables: str, interleaved: bool) -> None:
    options = {"k_heads": 2, "tables": tables, "rotary": 4, "table_dtype": torch.float64}
    case = RopeCase(shape=(2, 3, 2, 6), dtype=torch.float64, interleaved=interleaved, **options)
    args = OP.forward_args(case, OP.tensors(case))
    leaves = [tensor.requires_grad_() for tensor in args[:4]]
    assert torch.autograd.gradcheck(lambda *t: liger_ops.rope(*t, interleaved), leaves)


def test_fixed_tables_save_neither_q_nor_k() -> None:
    q, k = (x.requires_grad_() for x in heads(torch.float32))
    cos, sin = rotary_tables(torch.float32)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        liger_ops.rope(q, k, cos, sin)
    assert {tensor.data_ptr() for tensor in saved} == {cos.data_ptr(), sin.data_ptr()}


def test_batch_and_length_never_recompile() -> None:
    """One compilation for every batch and length, of the heads of a projection; no copy of them in
    the graph, and results with the layout of eager's."""

    def model(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k = x.view(*x.shape[:2], -1, 16).transpose(1, 2).split((4, 2), 1)
        return liger_ops.rope(q, k, cos, sin)

    recorder = Recorder()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=recorder.backend())
    for B, S in ((2, 3), (5, 7), (4, 64)):
        x = torch.randn(B, S, 96, requires_grad=True)
        cos, sin = torch.randn(B, S, 16), torch.randn(B, S, 16)
        expected = model(x, cos, sin)
        for a, b in zip(compiled(x, cos, sin), expected, strict=True):
            assert torch.equal(a, b) and a.stride() == b.stride()
            assert a.transpose(1, 2).is_contiguous()
    assert len(recorder.forwards) == 1
    assert not any(
        "clone" in str(node.target) or "contiguous" in str(node.target)
        for graph in recorder.forwards
        for node in graph.graph.nodes
    )


def test_inductor_keeps_the_layout() -> None:
    """Where Inductor itself writes q and k: the strides that tracing saw."""

    def model(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k = (2 * x).view(*x.shape[:2], -1, 16).transpose(1, 2).split((4, 2), 1)
        return tuple(y + 1 for y in liger_ops.rope(q + 1, k * 3, cos, sin))

    torch._dynamo.reset()
    x = torch.randn(2, 3, 96, requires_grad=True)
    cos, sin = torch.randn(2, 3, 16), torch.randn(2, 3, 16)
    outputs, expected = torch.compile(model, fullgraph=True)(x, cos, sin), model(x, cos, sin)
    for a, b in zip(outputs, expected, strict=True):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b)
    (grad,), (expected_grad,) = (
        torch.autograd.grad([y.square().sum() for y in ys], x) for ys in (outputs, expected)
    )
    torch.testing.assert_close(grad, expected_grad)


def test_module() -> None:
    q, k = heads(torch.float32)
    for interleaved in (False, True):
        tables = rotary_tables(torch.float32, interleaved)
        module = liger_ops.nn.Rope(interleaved)
        assert repr(module) == f"Rope(interleaved={interleaved})"
        expected = liger_ops.rope(q, k, *tables, interleaved)
        for a, b in zip(module(q, k, *tables), expected, strict=True):
            assert torch.equal(a, b)


def test_rejects() -> None:
    q, k, table = torch.zeros(2, 4, 3, 8), torch.zeros(2, 1, 3, 8), torch.zeros(3, 8)
    for args, message in (
        ((q[0], k, table, table), "rope: q must be (B, heads, S, D), got shape (4, 3, 8)"),
        (
            (q, k[:, :, :2], table, table),
            "rope: k must have the shape of q but for the heads, (2, 'heads', 3, 8),"
            " got (2, 1, 2, 8)",
        ),
        (
            (q, k, table[:2], table),
            "rope: cos must be (S, R), (1, S, R) or (B, S, R) for q's S of 3 and B of 2,"
            " got shape (2, 8)",
        ),
        (
            (q, k, table[:, :5], table),
            "rope: cos must have an even number of columns from 2 to q's D of 8, got 5",
        ),
        (
            (q, k, table, table[:, :4]),
            "rope: sin must have the shape of cos, (3, 8), got (3, 4)",
        ),
    ):
        op_checks.assert_rejects(OP, args, message)
    with pytest.raises(TypeError, match="rope: k must have q's dtype, torch.float32, got"):
        liger_ops.rope(q, k.double(), table, table)
