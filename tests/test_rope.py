"""rope against float64 truth, and against the code that people replace with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as cohere_rope
from transformers.models.glm4.modeling_glm4 import apply_rotary_pos_emb as glm4_rope
from transformers.models.gpt_oss.modeling_gpt_oss import apply_rotary_pos_emb as gpt_oss_rope
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama_rope
from transformers.models.llama4.modeling_llama4 import apply_rotary_emb as llama4_rope
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding

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


# The forms of tables that a kernel reads in another way.
TABLE_FORMS = {
    "per-pair": {"per_pair": True},
    "strided": {"per_pair": True, "table_layout": "strided"},
    "complex": {"is_complex": True, "table_dtype": torch.float32},
    "complex-strided": {
        "is_complex": True,
        "table_dtype": torch.float32,
        "table_layout": "strided",
    },
    "sections": {"sections": (16, 24, 24)},
    "odd-sections": {"sections": (0, 13, 51)},
    "interleaved-sections": {"sections": (16, 24, 24), "interleaved": True},
    "complex-sections": {
        "is_complex": True,
        "table_dtype": torch.float32,
        "sections": (16, 24, 24),
    },
}


@pytest.mark.device_kernels
@EVERY_FOLDER
@pytest.mark.parametrize("form", TABLE_FORMS)
def test_tables_by_the_host_codes_own_plan(folder: str, form: str) -> None:
    """A model's sizes, and a partial rotation of them."""
    whole = RopeCase(
        shape=(2, 4, 3, 128),
        dtype=torch.bfloat16,
        k_heads=2,
        tables="batch",
        rotary=128,
        layout="model",
        k_layout="model",
        **{"table_dtype": torch.bfloat16, **TABLE_FORMS[form]},
    )
    for case in (whole, replace(whole, shape=(2, 4, 3, 160))):
        op_checks.assert_forward_matches_truth(OP, folder, case)
        op_checks.assert_backward_matches_truth(OP, folder, case)


def test_tables_are_read_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the cuda kernel, at any strides, the real and imaginary parts of complex numbers too."""
    from liger_ops.lowering.cuda import rope as module

    launched: list[tuple[Any, ...]] = []
    monkeypatch.setattr(module, "launch", lambda *args, **options: launched.append(args))
    for form in TABLE_FORMS.values():
        case = RopeCase(
            shape=(2, 4, 3, 128),
            dtype=torch.bfloat16,
            tables="batch",
            rotary=128,
            layout="model",
            k_layout="model",
            **form,
        )
        args = OP.forward_args(case, OP.tensors(case))
        OP.kernel("cuda")(*args)
        stored = {tensor.untyped_storage().data_ptr() for tensor in args[:4] if tensor is not None}
        read = [arg for arg in launched.pop() if isinstance(arg, Tensor)]
        # Its outputs are the last two.
        assert {tensor.untyped_storage().data_ptr() for tensor in read[:-2]} == stored


@pytest.mark.device_kernels
@EVERY_FOLDER
def test_what_is_not_rotated_is_copied(folder: str) -> None:
    """Bit for bit, infinities too."""
    case = RopeCase(shape=(2, 3, 5, 20), dtype=torch.bfloat16, rotary=6, layout="model")
    q, k, cos, sin, *options = OP.forward_args(case, OP.tensors(case))
    q[..., 6:] = torch.linspace(-torch.inf, 0, 14)
    for backward, mask in ((False, ()), (True, ([True, True],))):
        args = (q, k, cos, sin, *options, *mask)
        outputs = op_checks.run_kernel(OP, folder, backward, case, args)
        for output, x in zip(outputs, (q, k), strict=True):
            assert output is not None
            assert torch.equal(output[..., 6:].view(torch.int16), x[..., 6:].view(torch.int16))


@pytest.mark.device_kernels
@EVERY_FOLDER
@pytest.mark.parametrize("q_heads, k_heads", ((3, 0), (0, 2), (0, 0)))
def test_no_heads(folder: str, q_heads: int, k_heads: int) -> None:
    """One tensor is rotated beside another of no heads."""
    case = RopeCase(shape=(2, q_heads, 5, 8), dtype=torch.float32, k_heads=k_heads, rotary=8)
    tensors = OP.tensors(case)
    for backward, args in (
        (False, OP.forward_args(case, tensors)),
        (True, OP.backward_args(case, tensors)),
    ):
        definition = liger_ops.library.OPS[OP.backward_name if backward else OP.name].definition
        outputs = op_checks.run_kernel(OP, folder, backward, case, args)
        for output, true in zip(outputs, definition(*args), strict=True):
            torch.testing.assert_close(output, true)


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


def rotary_angles() -> torch.Tensor:
    """Of 2 sequences of 5 positions, for 8 pairs."""
    positions = torch.arange(5.0) + torch.tensor([[0.0], [7.0]])
    return positions[..., None] / 10000 ** (torch.arange(8) / 8)


def rotary_tables(dtype: torch.dtype, interleaved: bool = False) -> tuple[torch.Tensor, ...]:
    angles = rotary_angles()
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


def assert_all_agree(
    inputs: tuple[torch.Tensor, ...],
    outputs: tuple[torch.Tensor, ...],
    expected: tuple[torch.Tensor, ...],
) -> None:
    """And the gradients of the inputs."""
    weights = [torch.randn_like(output) for output in outputs]
    grads = torch.autograd.grad(outputs, inputs, weights)
    expected_grads = torch.autograd.grad(expected, inputs, weights)
    for a, b in zip((*outputs, *grads), (*expected, *expected_grads), strict=True):
        assert_agrees(a, b)


DTYPES = pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))


@DTYPES
def test_agrees_with_transformers(dtype: torch.dtype) -> None:
    """Llama's, Cohere's, GLM4's partial and GPT-OSS's rotation, forward and gradient."""
    half, interleaved = rotary_tables(dtype), rotary_tables(dtype, interleaved=True)
    # The numbers of the pairs, as views.
    first_half, every_other = (
        tuple(table[..., index] for table in tables)
        for tables, index in ((half, slice(8)), (interleaved, slice(None, None, 2)))
    )
    for theirs, tables, their_tables, options, D in (
        (llama_rope, half, half, (), 16),
        (llama_rope, first_half, half, (False, True), 16),
        (cohere_rope, interleaved, interleaved, (True,), 16),
        (cohere_rope, every_other, interleaved, (True, True), 16),
        (glm4_rope, interleaved, half, (True,), 24),
        (glm4_rope, first_half, half, (True, True), 24),
        (gpt_oss_rope, first_half, first_half, (False, True), 16),
    ):
        q, k = (x.requires_grad_() for x in heads(dtype, D))
        outputs = liger_ops.rope(q, k, *tables, *options)
        assert_all_agree((q, k), outputs, theirs(q, k, *their_tables))


@DTYPES
def test_agrees_with_llama4(dtype: torch.dtype) -> None:
    """Its complex frequencies; q and k are (B, S, heads, D), and stay so."""
    freqs = torch.polar(torch.ones(()), rotary_angles())
    for freqs_cis in (freqs, freqs[:1], freqs * 0.7):
        q, k = (x.transpose(1, 2).detach().requires_grad_() for x in heads(dtype))
        rotated = liger_ops.rope(q.transpose(1, 2), k.transpose(1, 2), freqs_cis)
        outputs = tuple(y.transpose(1, 2) for y in rotated)
        assert all(y.is_contiguous() for y in outputs)
        assert_all_agree((q, k), outputs, llama4_rope(q, k, freqs_cis))


def test_conjugate_frequencies_rotate_back() -> None:
    q, k = heads(torch.float32)
    freqs_cis = torch.polar(torch.ones(()), rotary_angles())
    forth = liger_ops.rope(q, k, freqs_cis)
    for x, y in zip((q, k), liger_ops.rope(*forth, freqs_cis.conj()), strict=True):
        torch.testing.assert_close(x, y)


@DTYPES
@pytest.mark.parametrize("sections", ((2, 3, 3), (8, 0, 0), (1, 7, 0)))
def test_agrees_with_qwen2_vl(dtype: torch.dtype, sections: tuple[int, ...]) -> None:
    """Of the three positions, the model puts one table together; here the three are given."""
    config = Qwen2VLTextConfig(
        hidden_size=64,
        num_attention_heads=4,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": list(sections),
        },
    )
    rotary = Qwen2VLRotaryEmbedding(config)
    positions = torch.randint(50, (3, 2, 5), generator=torch.Generator().manual_seed(1))
    q, k = (x.requires_grad_() for x in heads(dtype))
    composed = rotary(q, positions)
    angles = positions[..., None] * rotary.inv_freq
    tables = angles.cos().to(dtype), angles.sin().to(dtype)
    whole = tuple(torch.cat((table, table), -1) for table in tables)
    for three, per_pair in ((tables, True), (whole, False)):
        outputs = liger_ops.rope(q, k, *three, per_pair=per_pair, sections=list(sections))
        assert_all_agree((q, k), outputs, llama_rope(q, k, *composed))


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
@pytest.mark.parametrize("per_pair", (False, True))
@pytest.mark.parametrize("sections", (None, (1, 0, 1)))
def test_gradients_of_learned_tables(
    tables: str, interleaved: bool, per_pair: bool, sections: tuple[int, ...] | None
) -> None:
    case = RopeCase(
        shape=(2, 3, 2, 6),
        dtype=torch.float64,
        k_heads=2,
        tables=tables,
        rotary=4,
        table_dtype=torch.float64,
        interleaved=interleaved,
        per_pair=per_pair,
        sections=sections,
    )
    q, k, cos, sin, *options = OP.forward_args(case, OP.tensors(case))
    leaves = [tensor.requires_grad_() for tensor in (q, k, cos, sin)]
    assert torch.autograd.gradcheck(lambda *t: liger_ops.rope(*t, *options), leaves)


@pytest.mark.parametrize("tables", ("none", "one", "batch"))
@pytest.mark.parametrize("sections", (None, (1, 0, 1)))
def test_gradients_of_learned_complex_frequencies(
    tables: str, sections: tuple[int, ...] | None
) -> None:
    """By PyTorch's convention, and those of the real tables that they hold."""
    case = RopeCase(
        shape=(2, 3, 2, 6),
        dtype=torch.float64,
        k_heads=2,
        tables=tables,
        rotary=4,
        table_dtype=torch.float64,
        is_complex=True,
        sections=sections,
    )
    q, k, freqs_cis, _, *options = OP.forward_args(case, OP.tensors(case))
    leaves = [tensor.requires_grad_() for tensor in (q, k, freqs_cis)]
    assert torch.autograd.gradcheck(lambda *t: liger_ops.rope(*t, None, *options), leaves)
    cos, sin = (part.detach().clone().requires_grad_() for part in (freqs_cis.real, freqs_cis.imag))
    dcos, dsin = torch.autograd.grad(
        sum(y.pow(3).sum() for y in liger_ops.rope(q, k, cos, sin, True, True, case.sections)),
        (cos, sin),
    )
    grad = torch.autograd.grad(
        sum(y.pow(3).sum() for y in liger_ops.rope(q, k, freqs_cis, sections=case.sections)),
        freqs_cis,
    )
    torch.testing.assert_close(grad[0], torch.complex(dcos, dsin))


def test_fixed_tables_save_neither_q_nor_k() -> None:
    q, k = (x.requires_grad_() for x in heads(torch.float32))
    cos, sin = rotary_tables(torch.float32)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        liger_ops.rope(q, k, cos, sin)
    assert {tensor.data_ptr() for tensor in saved} == {cos.data_ptr(), sin.data_ptr()}


@pytest.mark.parametrize("form", ("elements", "pairs", "complex", "sections"))
def test_batch_and_length_never_recompile(form: str) -> None:
    """One compilation for every batch and length, of the heads of a projection; no copy of them in
    the graph, and results with the layout of eager's."""
    options = {"pairs": (False, True), "sections": (False, False, [2, 3, 3])}.get(form, ())

    def model(x: torch.Tensor, *tables: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        q, k = x.view(*x.shape[:2], -1, 16).transpose(1, 2).split((4, 2), 1)
        return liger_ops.rope(q, k, *tables, *options)

    def tables(B: int, S: int) -> tuple[torch.Tensor | None, ...]:
        if form == "complex":
            return torch.randn(B, S, 8, dtype=torch.complex64), None
        shape = (B, S, 8 if form == "pairs" else 16)
        shape = (3, *shape) if form == "sections" else shape
        return torch.randn(shape), torch.randn(shape)

    recorder = Recorder()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=recorder.backend())
    # No size is that of the three tables, which dynamo would take it for.
    for B, S in ((2, 6), (5, 7), (4, 64)):
        x = torch.randn(B, S, 96, requires_grad=True)
        args = tables(B, S)
        expected = model(x, *args)
        for a, b in zip(compiled(x, *args), expected, strict=True):
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
        assert repr(module) == f"Rope(interleaved={interleaved}, per_pair=False, sections=None)"
        expected = liger_ops.rope(q, k, *tables, interleaved)
        for a, b in zip(module(q, k, *tables), expected, strict=True):
            assert torch.equal(a, b)
    angles = rotary_angles()
    tables = angles.cos(), angles.sin()
    freqs_cis = torch.complex(*tables)
    three = tuple(torch.stack((table, table + 1, table - 1)) for table in tables)
    for module, args, options in (
        (liger_ops.nn.Rope(per_pair=True), tables, (False, True)),
        (liger_ops.nn.Rope(), (freqs_cis,), ()),
        (liger_ops.nn.Rope(True, True, (2, 3, 3)), three, (True, True, [2, 3, 3])),
    ):
        expected = liger_ops.rope(q, k, *args, *options)
        for a, b in zip(module(q, k, *args), expected, strict=True):
            assert torch.equal(a, b)


def test_rejects() -> None:
    q, k, table = torch.zeros(2, 4, 3, 8), torch.zeros(2, 1, 3, 8), torch.zeros(3, 8)
    freqs_cis, three = torch.zeros(3, 4, dtype=torch.complex64), torch.zeros(3, 2, 3, 8)
    form = "(S, R), (1, S, R) or (B, S, R)"
    per_pair = "(S, R/2), (1, S, R/2) or (B, S, R/2)"
    sizes = "for q's S of 3 and B of 2, got shape"
    for args, message in (
        ((q[0], k, table, table), "q must be (B, heads, S, D), got shape (4, 3, 8)"),
        (
            (q, k[:, :, :2], table, table),
            "k must have the shape of q but for the heads, (2, 'heads', 3, 8), got (2, 1, 2, 8)",
        ),
        ((q, k, table[:2], table), f"cos must be {form} {sizes} (2, 8)"),
        ((q, k, three, three), f"cos must be {form} {sizes} (3, 2, 3, 8)"),
        ((q, k, freqs_cis[:2]), f"cos must be {per_pair} {sizes} (2, 4)"),
        (
            (q, k, table[:2], table, False, True),
            f"cos must be {per_pair} {sizes} (2, 8)",
        ),
        (
            (q, k, table, table, False, False, [1, 1, 2]),
            f"cos must be (3, 1, S, R) or (3, B, S, R), with sections, {sizes} (3, 8)",
        ),
        (
            (q, k, table[:, :5], table),
            "cos must have an even number of columns from 2 to q's D of 8, got 5",
        ),
        (
            (q, k, table, table, False, True),
            "cos must have from 1 column to half of q's D of 8, one for each pair, got 8",
        ),
        ((q, k, table, table[:, :4]), "sin must have the shape of cos, (3, 8), got (3, 4)"),
        ((q, k, table), "sin must be given with a real cos, got None"),
        (
            (q, k, freqs_cis, table),
            "sin must be None with a complex cos, which holds it, got a tensor of shape (3, 8)",
        ),
        (
            (q, k, three, three, False, False, [1, 1, 1]),
            "sections must be three counts of pairs that add up to R/2, 4, got [1, 1, 1]",
        ),
        (
            (q, k, three, three, False, False, [5, -1, 0]),
            "sections must be three counts of pairs that add up to R/2, 4, got [5, -1, 0]",
        ),
        (
            (q, k, three, three, False, False, [2, 2]),
            "sections must be three counts of pairs that add up to R/2, 4, got [2, 2]",
        ),
    ):
        op_checks.assert_rejects(OP, args, f"rope: {message}")
    with pytest.raises(TypeError, match="rope: k must have q's dtype, torch.float32, got"):
        liger_ops.rope(q, k.double(), table, table)
    with pytest.raises(TypeError, match="rope: a complex cos must be torch.complex64 or"):
        liger_ops.rope(q, k, freqs_cis.to(torch.complex32))
    with pytest.raises(TypeError, match="rope: sin must be a floating point tensor, got"):
        liger_ops.rope(q, k, table, freqs_cis)
