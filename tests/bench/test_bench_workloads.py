"""Every provider of a workload computes what the op does, and all of its work is counted."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from liger_ops.bench.measure import ProviderCall, relative_error
from liger_ops.bench.providers import Peers, functions
from liger_ops.bench.workloads import DTYPES, ENTRIES, selected
from liger_ops.bench.workloads.attention import masked_attention, model_multi_token
from liger_ops.bench.workloads.entry import Draw, Workload, as_tuple, truth_at_once
from liger_ops.bench.workloads.experts import model_experts
from liger_ops.bench.workloads.hyper_connections import (
    deepseek_coeffs,
    deepseek_post_res,
    deepseek_pre,
)
from liger_ops.bench.workloads.layers import model_attn_res
from liger_ops.bench.workloads.listed_words import model_head_and_listed_words
from liger_ops.bench.workloads.losses import (
    LOGITS_AT_ONCE,
    model_divergence,
    model_head_and_loss,
    model_jsd,
    model_log_prob,
    model_loss,
    truth_by_rows,
)
from liger_ops.bench.workloads.softmaxes import model_sparsemax

HEAD = (7, 16, 50)
TINY = {
    **dict.fromkeys(("lora_linear", "tiled_mlp", "linear_cross_entropy", "linear_log_prob"), HEAD),
    **dict.fromkeys(("linear_divergence", "linear_top_k", "linear_top_k_divergence"), HEAD),
    "linear_score_centering": HEAD,
    **dict.fromkeys(("mhc_coeffs", "mhc_pre", "mhc_post_res"), (6, 4, 32)),
    **dict.fromkeys(("rope", "rms_norm_rope"), (2, 5, 4, 2, 8)),
    **dict.fromkeys(("modulated_rms_norm", "modulated_layer_norm"), (2, 3, 32)),
    **dict.fromkeys(("attn_res", "router_losses"), (3, 6, 32)),
    # As many words as rows, so that either is the number of rows that the forward reads.
    "embedding": (6, 6, 32), "group_norm": (2, 64, 3, 3), "moe_experts": (7, 2, 3, 16, 50),
    "varlen_attention": (40, 3, 4, 2, 8),
    "neighborhood_attention": (2, 140, 2, 8), "multi_token_attention": (2, 3, 9),
}  # fmt: skip
EXPERTS = ("moe_experts",)
EVERY_OP = pytest.mark.parametrize("op", ENTRIES)


def call_of(op: str, name: str, dtype: torch.dtype, peers: Peers | None = None) -> ProviderCall:
    entry = ENTRIES[op]
    draw = Draw("cpu", dtype)
    inputs = entry.inputs(draw, TINY.get(op, (6, 32)))
    dys = entry.upstream(draw, inputs)
    return ProviderCall(functions(entry, [name], peers or Peers())[name], inputs, dys)


def error_of(op: str, call: ProviderCall) -> float:
    entry = ENTRIES[op]
    truth = entry.truth(entry.definition, call.tensors, call.dys)
    return relative_error(call.results(), truth)


@EVERY_OP
def test_ours_and_torchs_compute_the_same(op: str) -> None:
    entry = ENTRIES[op]
    others = {"low-memory": entry.low_memory, "eager": entry.eager, "aten": entry.aten}
    names = ["liger_ops", *(name for name, function in others.items() if function is not None)]
    assert len(names) > 1
    for name in names:
        assert error_of(op, call_of(op, name, torch.float32)) < 1e-6


@EVERY_OP
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_the_definition_rounds_no_more_than_the_models_code(op: str, dtype: torch.dtype) -> None:
    """Results and gradients, and no more than a few roundings: this is the independent computation
    behind the tests of kernels."""
    models = "aten" if ENTRIES[op].eager is None else "eager"
    ours, theirs = (error_of(op, call_of(op, name, dtype)) for name in ("liger_ops", models))
    assert ours <= min(1.25 * theirs, 0.75 * torch.finfo(dtype).eps)


@EVERY_OP
def test_a_changed_reference_is_noticed(op: str) -> None:
    entry, call = ENTRIES[op], call_of(op, "liger_ops", torch.float32)

    def changed(*tensors: Tensor) -> Any:
        outputs = tuple(1.001 * y for y in as_tuple(entry.definition(*tensors)))
        return outputs if len(outputs) > 1 else outputs[0]

    assert relative_error(call.results(), truth_at_once(changed, call.tensors, call.dys)) > 5e-4


@EVERY_OP
def test_the_least_work_is_that_of_the_tensors(op: str) -> None:
    """The bytes are counted again from the tensors, without the small parameters, the tables, and
    the results per row."""
    entry, shape = ENTRIES[op], TINY.get(op, (6, 32))
    if op == "varlen_attention":
        T, documents, heads, _, width = shape
        product = 2 * T * (T // documents / 2) * heads * width
        counted = {"forward": 2, "backward": 5, "full": 7}
        for mode, products in counted.items():
            # T is not a multiple of the documents.
            assert math.isclose(entry.work(shape)[mode], products * product, rel_tol=0.1)
        return
    if entry.is_matrix_product:
        # Each token is a row of as many experts as it has.
        rows, width, classes = (math.prod(shape[:-3]), *shape[-2:]) if op in EXPERTS else shape
        # The teacher's logits are one product more, an MLP has three weights, and a frozen weight
        # has no gradient.
        counts = {"linear_divergence": 4, "tiled_mlp": 9, "moe_experts": 9, "lora_linear": 2}
        products = counts.get(op, 3)
        assert entry.work(shape) == {"full": products * 2 * rows * width * classes}
        return
    call = call_of(op, "liger_ops", torch.float32)

    def large(tensors: Iterable[Tensor]) -> list[int]:
        """The coefficients of a hyper-connection, and phi, are small: they have no channels. So are
        the rows of scale and shift, which are for the tokens of a sample."""
        anywhere = not op.startswith("mhc_")
        few = 2 if op.startswith("modulated") else 1
        found = [t for t in tensors if t.dim() > few and (anywhere or t.shape[-1] == shape[-1])]
        return [t.numel() for t in found]

    trained = large(t for t in call.tensors if t.requires_grad)
    # The teacher's logits or probabilities have no gradient.
    taught = op in ("divergence", "kl_div", "jsd", "tvd")
    read = trained * 2 if taught else trained
    outputs = large(call.forward())
    work = entry.work(shape)
    assert work["forward"] == sum(read) + sum(outputs)
    if "backward" in work:
        dys = sum(large(call.dys))
        # rope's backward needs neither q nor k, and embedding's only the indices; the sum and its
        # one gradient stand for two inputs; softmax's needs the output, of the input's size;
        # kl_div's needs the target alone.
        one_of_them = {"fused_add_rms_norm": read[0], "kl_div": read[0]}
        saved = {"rope": 0, "embedding": 0, **one_of_them}.get(op, sum(read))
        gradients = read[0] if op == "fused_add_rms_norm" else sum(trained)
        assert work["backward"] == dys + saved + gradients
        assert work["full"] == work["forward"] + work["backward"]
    else:
        assert work["full"] == work["forward"] + 2 * sum(read)


def test_work_is_bytes_where_no_matrix_is_multiplied() -> None:
    norm = Workload(ENTRIES["rms_norm"], (6, 32), torch.bfloat16)
    assert norm.work("forward") == 2 * 6 * 32 * 2
    head = Workload(ENTRIES["linear_cross_entropy"], (7, 16, 50), torch.bfloat16)
    assert head.work("full") == 6 * 7 * 16 * 50


@pytest.mark.parametrize("at_once", (50, 150, LOGITS_AT_ONCE))
def test_the_truth_by_rows_is_the_truth(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("liger_ops.bench.workloads.losses.LOGITS_AT_ONCE", at_once)
    draw = Draw("cpu", torch.float32)
    dys = [torch.tensor(3.0)]
    for definition, tensors in (
        (model_loss, [draw.leaf(7, 50), draw.classes(7, 50)]),
        (model_head_and_loss, [draw.leaf(7, 16), draw.leaf(50, 16), draw.classes(7, 50)]),
        (model_divergence, [draw.leaf(7, 50), draw.normal(7, 50)]),
        (model_log_prob, [draw.leaf(7, 50), draw.classes(7, 50)]),
    ):
        if definition is model_log_prob:
            dys = [draw.normal(7), draw.normal(7)]
        parts, whole = (f(definition, tensors, dys) for f in (truth_by_rows, truth_at_once))
        for found, expected in zip(parts, whole, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_rope_reads_the_views_of_attention() -> None:
    call = call_of("rope", "liger_ops", torch.float32)
    q, k, *_ = call.tensors
    assert not q.is_contiguous() and q.transpose(1, 2).is_contiguous()
    assert [dy.stride() for dy in call.dys] == [q.stride(), k.stride()]


def rms(x: Any, weight: Any, eps: float, offset: float = 0.0) -> Any:
    return F.rms_norm(x, weight.shape, weight + offset, eps)


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Peers:
    """Packages with the peers' names and signatures, computed by PyTorch."""

    def turned(x: Any, cos: Any, sin: Any) -> Any:
        cos, sin = (torch.cat((t, t), -1).unsqueeze(-2) for t in (cos, sin))
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    def liger_rope(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        half = cos.shape[-1] // 2
        tables = (cos[0, :, :half], sin[0, :, :half])
        return tuple(turned(x.transpose(1, 2), *tables).transpose(1, 2) for x in (q, k))

    def liger_add(x: Any, r: Any, w: Any, eps: float, offset: float, mode: str, place: bool) -> Any:
        return rms(x + r, w, eps, offset), x + r

    def group(
        x: Any, weight: Any, bias: Any, num_channels: int, num_groups: int, eps: float
    ) -> Any:
        assert num_channels == x.shape[1]
        return F.group_norm(x, num_groups, weight, bias, eps)

    def quack_rms(
        x: Any, weight: Any, residual: Any = None, eps: float = 1e-6, prenorm: bool = False
    ) -> Any:
        s = x if residual is None else x + residual
        return (rms(s, weight, eps), s) if prenorm else rms(s, weight, eps)

    class ChunkedLogProb:
        @staticmethod
        def apply(
            x: Any, weight: Any, bias: Any, target: Any, temperature: float, chunk_size: int,
            softcap: Any, logit_scale: float, outputs: tuple[str, ...],
        ) -> Any:  # fmt: skip
            assert bias is softcap is None and (temperature, logit_scale) == (1, 1)
            return *model_log_prob(x @ weight.T, target), None, None, None

    class ChunkedDivergence:
        @staticmethod
        def apply(x, weight, bias, teacher_x, teacher_weight, teacher_bias, beta):
            assert bias is teacher_bias is None and beta == 0.5
            return model_divergence(x @ weight.T, teacher_x @ teacher_weight.T).reshape(1), None

    def listed_words(
        x: Any, weight: Any, bias: Any, logit_scale: float, softcap: Any,
        ids: Any, log_prob: Any, mask: Any, beta: float, temperature: float, tail: bool,
        teachers: Any, count: int, chunk_size: int,
    ) -> Any:  # fmt: skip
        assert bias is softcap is teachers is None and bool(mask.all()) and tail
        assert (logit_scale, beta, temperature, count, chunk_size) == (1, 0.5, 1, 1, 256)
        loss = model_head_and_listed_words(x, weight, ids)
        assert log_prob.exp().sum(-1).allclose(torch.tensor(0.9))
        return loss * len(x), None, None, None, None

    class Embedding:
        def apply(embeddings: Any, indices: Any) -> Any:
            return F.embedding(indices, embeddings)

    class Experts:
        apply = staticmethod(model_experts)

    distillation = "trl.experimental.async_distillation"
    modules = {
        f"{distillation}.async_distillation_trainer": {
            "_chunked_jsd_loss": listed_words,
            "_CHUNKED_LM_HEAD_CHUNK_SIZE": 256,
        },
        "liger_kernel.transformers.functional": {
            "liger_rms_norm": lambda x, w, eps, offset, mode, place: rms(x, w, eps, offset),
            "liger_modulated_rms_norm": lambda x, w, scale, shift, eps, offset, mode, place: (
                rms(x, w, eps, offset) * (1 + scale[:, None]) + shift[:, None]
            ),
            "liger_fused_add_rms_norm": liger_add,
            "liger_layer_norm": lambda x, w, b, eps: F.layer_norm(x, w.shape, w, b, eps),
            "liger_group_norm": group,
            "liger_dyt": lambda x, alpha, gamma, beta: gamma * torch.tanh(x * alpha) + beta,
            "liger_poly_norm": lambda x, w, b, eps, place: (
                sum(w[3 - p] * rms(x**p, torch.ones_like(x[0]), eps) for p in (3, 2, 1)) + b
            ),
            "liger_sparsemax": lambda x: model_sparsemax(x),
            "liger_swiglu": lambda a, b: F.silu(a) * b,
            "liger_geglu": lambda a, b: F.gelu(a, approximate="tanh") * b,
            "liger_jsd": lambda q, p: model_jsd(q, p),
            "liger_kl_div": lambda q, p, reduction: F.kl_div(q, p, reduction=reduction),
            "liger_tvd": lambda p, q, reduction: (p - q).abs().sum() / 2 / len(p),
            "liger_fused_linear_jsd": lambda x, weight, teacher_x, teacher_weight: model_divergence(
                x @ weight.T, teacher_x @ teacher_weight.T
            ),
            "liger_mhc_coeffs": lambda *tensors, allow_fp32, pre_eps: deepseek_coeffs(*tensors),
            "liger_mhc_pre": deepseek_pre,
            "liger_mhc_post_res": deepseek_post_res,
            "liger_attn_res": lambda x, query, weight, eps: model_attn_res(x, query, weight),
            "liger_relu_squared": lambda x: F.relu(x) ** 2,
            "liger_fused_neighborhood_attention": lambda q, k, v, kernel_size: masked_attention(
                q, k, v
            ),
            "liger_multi_token_attention": lambda scores, weight, padding: model_multi_token(
                scores, weight
            ),
            "liger_softmax": lambda x: F.softmax(x, -1),
            "liger_rope": liger_rope,
            "liger_cross_entropy": lambda input, target: F.cross_entropy(input, target),
            "liger_fused_linear_cross_entropy": lambda input, weight, target: F.cross_entropy(
                input @ weight.T, target
            ),
        },
        "liger_kernel.ops.experimental.embedding": {"LigerEmbeddingFunction": Embedding},
        "liger_kernel.ops.fused_moe": {"LigerFusedMoEFunction": Experts},
        "quack": {
            "rmsnorm": quack_rms,
            "softmax": lambda x: F.softmax(x, -1),
            "cross_entropy": lambda x, target: F.cross_entropy(x, target),
        },
        "trl.trainer.utils": {
            "selective_log_softmax_and_entropy": model_log_prob,
            "_ChunkedLogProbFunction": ChunkedLogProb,
            "_CHUNKED_LOGPROB_CHUNK_SIZE": 4096,
        },
        "trl.kernels.chunked_divergence": {"ChunkedDivergenceFunction": ChunkedDivergence},
        "quack.rotary": {"apply_rotary_emb": turned},
        "quack.linear_cross_entropy": {
            "chunked_linear_cross_entropy": lambda x, weight, target: F.cross_entropy(
                x @ weight.T, target
            )
        },
    }
    packages = ("liger_kernel", "liger_kernel.transformers", "liger_kernel.ops")
    packages += ("liger_kernel.ops.experimental", "trl", "trl.trainer", "trl.kernels")
    for name in (*packages, "trl.experimental", distillation, *modules):
        module = ModuleType(name)
        vars(module).update(modules.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)
    return Peers()


@pytest.mark.parametrize(
    ("op", "peer"), [(op, peer) for op, entry in ENTRIES.items() for peer in entry.peers]
)
def test_a_peer_is_called_with_its_own_arguments(op: str, peer: str, peers: Peers) -> None:
    assert error_of(op, call_of(op, peer, torch.float32, peers)) < 1e-6


def test_a_peer_that_is_not_installed_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "quack", None)
    peers = Peers()
    assert list(functions(ENTRIES["softmax"], ["aten", "quack"], peers)) == ["aten"]
    assert list(peers.missing) == ["quack"]
    assert "\n" not in peers.missing["quack"]


def test_inductor_compiles_what_models_contain(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: seen.append(function))
    for entry in ENTRIES.values():
        functions(entry, ["inductor"], Peers())
    assert seen == [entry.eager or entry.aten for entry in ENTRIES.values()]


def test_figures_are_of_bfloat16_and_one_shape_where_the_host_is_the_limit() -> None:
    figures = selected(None, ["figures"], None)
    assert {w.row[1] for w in figures} == {"bfloat16"}
    (small,) = (w for w in figures if w.is_small)
    assert small.row == ("rms_norm", "bfloat16", "2048x4096") and "full" in small.modes
    assert {w.entry.op for w in figures} == {op for op, e in ENTRIES.items() if e.figures}


def test_selection_takes_models_sizes_and_sets_each_once() -> None:
    def rows(*arguments: Any) -> list[tuple[str, ...]]:
        return [tuple(str(w).split()) for w in selected(*arguments)]

    assert rows(["swiglu"], ["llama-3.1-8b"], ["bfloat16"]) == [
        ("swiglu", "8192x14336", "bfloat16")
    ]
    assert rows(["geglu", "rope"], ["llama-3.1-8b"], None) == [
        ("rope", "2x4096x32x8x128", dtype) for dtype in DTYPES
    ]
    assert rows(["rms_norm"], ["2048x4096", "small", "2048x4096"], ["float32"]) == [
        ("rms_norm", "2048x4096", "float32")
    ]
    both = rows(["rope", "softmax"], ["6x32", "2x5x4x2x8"], ["float32"])
    assert both == [("rope", "2x5x4x2x8", "float32"), ("softmax", "6x32", "float32")]
    everything = rows(None, ["models", "small"], None)
    assert {op for op, _, _ in everything} == set(ENTRIES)
    assert len(everything) == len(set(everything))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((["rmsnorm"], ["small"], None), "there is no op 'rmsnorm'"),
        ((None, ["huge"], None), "shape 'huge' is none of figures, models, small"),
        ((None, ["0x5"], None), "shape '0x5' is none of"),
        ((["rope"], ["6x32"], None), "no op here has a shape 6x32"),
        ((None, ["small"], ["float8"]), "dtype 'float8' is none of bfloat16, float32"),
    ],
)
def test_selection_rejects(arguments: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        selected(*arguments)


def test_shapes_have_the_ops_dimensions_and_groups_divide() -> None:
    for entry in ENTRIES.values():
        for shape in (*entry.figures, *entry.models.values(), entry.small):
            assert len(shape) == len(entry.dims)
            assert math.prod(shape) > 0
    for shape in ENTRIES["group_norm"].models.values():
        assert shape[1] % 32 == 0
