"""cross_entropy against float64 truth, and against torch.nn.functional.cross_entropy."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor
from triton.runtime import interpreter

import liger_ops
import losses
import op_checks
import strategies
from graphs import Recorder, liger_ops_of
from liger_ops import library
from liger_ops.nn import CrossEntropyLoss, CrossEntropyOutput
from losses import LossCase
from op_table import OPS
from op_under_test import DEVICE, FOLDERS
from plans import plan

OP = OPS["cross_entropy_forward-mean"]
EVERY_FOLDER = pytest.mark.parametrize("folder", FOLDERS)
NAN, INF = float("nan"), float("inf")


@pytest.mark.device_kernels
@EVERY_FOLDER
@given(case=strategies.losses())
def test_forward_matches_truth(folder: str, case: LossCase) -> None:
    op_checks.assert_forward_matches_truth(OP, folder, case)


@pytest.mark.device_kernels
@EVERY_FOLDER
@given(case=strategies.losses())
def test_backward_matches_truth(folder: str, case: LossCase) -> None:
    op_checks.assert_backward_matches_truth(OP, folder, case)


@pytest.mark.device_kernels
@EVERY_FOLDER
@settings(max_examples=settings().max_examples // 3)
@given(case=strategies.losses().filter(strategies.has_rows))
def test_properties(folder: str, case: LossCase) -> None:
    op_checks.assert_deterministic(OP, folder, case)
    op_checks.assert_tile_does_not_matter(OP, folder, case)


@pytest.mark.device_kernels
@EVERY_FOLDER
@settings(max_examples=settings().max_examples // 3)
@given(case=strategies.losses())
def test_predictions_and_entropy(folder: str, case: LossCase) -> None:
    case = replace(case, return_predicted=True, return_entropy=True)
    args = losses.forward_args(case, losses.tensors(case))
    *_, predicted, entropy = op_checks.run_kernel(OP, folder, False, case, args)
    logits = args[0]
    assert torch.equal(predicted, logits.argmax(-1))
    x = logits.double() * case.logit_scale
    x = x if case.softcap is None else case.softcap * torch.tanh(x / case.softcap)
    truth = torch.distributions.Categorical(logits=x).entropy() if x.numel() else x.sum(-1)
    truth[args[1] == case.ignore_index] = 0
    torch.testing.assert_close(entropy.double(), truth, rtol=2e-5, atol=2e-5)


@pytest.mark.device_kernels
@EVERY_FOLDER
@pytest.mark.parametrize("V", (4096, 32000, 50257, 128256, 151936))
def test_vocabularies_by_the_host_codes_own_plan(folder: str, V: int) -> None:
    case = LossCase(shape=(3, V), dtype=torch.bfloat16, output_mask=(False,) * 3)
    op_checks.assert_forward_matches_truth(OP, folder, case)
    op_checks.assert_backward_matches_truth(OP, folder, case)


@pytest.mark.device_kernels
@EVERY_FOLDER
@pytest.mark.parametrize("tile", (None, (2, 64), (2, 16), (1, 16)))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_infinities_and_nan(folder: str, tile: tuple[int, int] | None, dtype: torch.dtype) -> None:
    """As PyTorch: classes of -inf have probability 0, at the start of a row, at its end, and all
    but one; -inf alone, inf and NaN make NaN of their own token, and nothing of an ignored one."""
    x = torch.randn(10, 40, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    x[0, :33] = x[1, 20:] = x[2, 1:] = x[3] = -INF
    x[4, 5] = INF
    x[5, 39] = x[8] = NAN
    x[6, 5:] = torch.finfo(dtype).min
    target = torch.tensor([39, 0, 0, 1, 2, 3, 4, 20, -100, -100], device=DEVICE)
    case = LossCase(shape=(10, 40), dtype=dtype, tile=tile, reduction="none")
    options = (None, None, None, *case.options)
    outputs = op_checks.run_kernel(OP, folder, False, case, (x, target, *options, False, False))
    loss, _, lse, _, total_weight, _, _ = outputs
    reference = x.float().requires_grad_()
    expected = F.cross_entropy(reference, target, reduction="none")
    # Of logits so large that log(40) is lost in lse, PyTorch's devices give 0 or log(40).
    assert 0 <= loss[6] <= 3.7
    others = [row for row in range(10) if row != 6]
    torch.testing.assert_close(loss[others], expected.detach()[others], equal_nan=True)
    assert loss.isnan().tolist() == [row in (3, 4, 5) for row in range(10)]
    assert lse[3] == -INF and total_weight == 8
    dloss = torch.randn(10, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    args = (dloss, None, None, None, x, target, None, None, None, lse, total_weight)
    (dx,) = op_checks.run_kernel(OP, folder, True, case, (*args, *case.options))
    (expected,) = torch.autograd.grad(expected, reference, dloss)
    bad = [3, 4, 5]
    assert dx[bad].isnan().all() and bool((dx[[8, 9]] == 0).all())
    good = [0, 1, 2, 6, 7]
    torch.testing.assert_close(dx[good], expected[good].to(dtype))


@pytest.mark.device_kernels
@EVERY_FOLDER
@pytest.mark.parametrize("tile", (None, (2, 16)))
def test_softcap_of_huge_logits(folder: str, tile: tuple[int, int] | None) -> None:
    """The cap holds where the logits leave float32's range of exponents, and their slope is 0."""
    x = torch.tensor([[3e38, -3e38, 1e4, -1e4, INF, -INF, 0.0, 1.0]] * 2, device=DEVICE)
    target = torch.tensor([0, 6], device=DEVICE)
    case = LossCase(shape=(2, 8), dtype=x.dtype, tile=tile, softcap=20.0, reduction="none")
    args = (x, target, None, None, None, *case.options)
    loss, _, lse, target_logit, total_weight, _, _ = op_checks.run_kernel(
        OP, folder, False, case, (*args, False, False)
    )
    capped = (20 * torch.tanh(x.double() / 20)).requires_grad_()
    float32 = {"rtol": 2e-6, "atol": 2e-6}
    torch.testing.assert_close(lse.double(), capped.logsumexp(-1), **float32)
    torch.testing.assert_close(target_logit, torch.tensor([20.0, 0.0], device=DEVICE))
    expected = F.cross_entropy(capped, target, reduction="none")
    torch.testing.assert_close(loss.double(), expected, **float32)
    upstream = (torch.ones(2, device=DEVICE), None, None, None)
    (dx,) = op_checks.run_kernel(
        OP, folder, True, case, (*upstream, *args[:5], lse, total_weight, *case.options)
    )
    (dcapped,) = torch.autograd.grad(expected.sum(), capped)
    slope = 1 - torch.tanh(x.double() / 20).square()
    torch.testing.assert_close(dx.double(), dcapped * slope, rtol=1e-5, atol=1e-7)


@pytest.mark.device_kernels
@EVERY_FOLDER
@pytest.mark.parametrize("tile", (None, (2, 16)))
@pytest.mark.parametrize("wrong", (-1, 33, 2**31 - 1))
def test_a_target_out_of_range_is_loud(
    folder: str, wrong: int, tile: tuple[int, int] | None
) -> None:
    """Where no assertion stops the kernel, as in the interpreter, its loss is NaN."""
    if DEVICE == "cuda":
        pytest.skip("a device-side assertion ends the process's use of the GPU")
    case = LossCase(shape=(3, 33), dtype=torch.float32, tile=tile, reduction="none")
    x = torch.randn(case.shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    target = torch.tensor([1, wrong, -100], device=DEVICE)
    args = (x, target, torch.ones(33, device=DEVICE), None, None, *case.options, False, False)
    loss, *_ = op_checks.run_kernel(OP, folder, False, case, args)
    assert loss.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("reduction", ("mean", "none"))
@pytest.mark.parametrize("wrong", (-1, 33, 2**40))
def test_the_gpus_assertion(monkeypatch: pytest.MonkeyPatch, wrong: int, reduction: str) -> None:
    """What `debug` compiles into the reduction stops at a target out of range, and at no other."""
    builder = interpreter.interpreter_builder
    monkeypatch.setattr(builder, "options", replace(builder.options, debug=True))
    kernel = OP.kernel("cuda")
    kernel(torch.zeros(2, 33), torch.tensor([32, -100]), reduction=reduction)
    with pytest.raises(Exception, match="a target is neither ignore_index nor from 0 to V - 1"):
        kernel(torch.zeros(3, 33), torch.tensor([1, wrong, -100]), reduction=reduction)


@pytest.mark.parametrize("wrong", (-1, 33, 2**31 - 1))
@pytest.mark.parametrize("dtype", (torch.int64, torch.int32))
def test_a_target_out_of_range_is_an_index_error(wrong: int, dtype: torch.dtype) -> None:
    target = torch.tensor([1, wrong, -100], dtype=dtype)
    with pytest.raises(IndexError, match="cross_entropy: target must be .*-100, or from 0 to 32"):
        liger_ops.cross_entropy(torch.zeros(3, 33), target, torch.ones(33))


@pytest.mark.device_kernels
@EVERY_FOLDER
@given(case=strategies.losses())
@settings(max_examples=settings().max_examples // 2)
def test_loss_and_gradient_in_one_call(folder: str, case: LossCase) -> None:
    """What linear_cross_entropy calls for each chunk of logits: the gradient goes over them."""
    V = case.shape[-1]
    case = replace(case, shape=(5, V), reduction="none", layout="contiguous", has_items=False)
    tensors = losses.tensors(case)
    logits, target, weight, token_weight, _ = (tensors[name] for name in losses.INPUTS)
    outputs = {
        name: torch.full((5,), NAN, device=DEVICE)
        for name in ("loss", "z_loss", "lse", "target_logit")
    }
    chunk = logits.clone()
    module = importlib.import_module(f"liger_ops.lowering.{folder}.cross_entropy")
    options = dict(
        zip(
            ("ignore_index", "label_smoothing", "lse_square_scale", "softcap", "logit_scale"),
            (case.ignore_index, *case.options[2:]),
            strict=True,
        )
    )
    module.loss_and_gradient(
        chunk,
        target,
        weight,
        token_weight,
        **options,
        **outputs,
        predicted_tokens=None,
        entropy=None,
        gradient=True,
        plan=plan(folder, OP, case),
    )
    args = losses.forward_args(case, tensors)
    kernel = op_checks.run_kernel(OP, folder, False, case, args)
    for name, expected in zip(("loss", "z_loss", "lse", "target_logit"), kernel[:4], strict=True):
        torch.testing.assert_close(outputs[name], expected, equal_nan=True)
    ones = {"dloss": torch.ones(5, device=DEVICE), "dz_loss": None, "dlse": None}
    upstream = {**tensors, **ones, "dtarget_logit": None}
    args = losses.backward_args(case, {**upstream, "lse": kernel[2], "total_weight": kernel[4]})
    (expected,) = op_checks.run_kernel(OP, folder, True, case, args)
    bound = 4 * torch.finfo(case.dtype).eps
    # A compiler contracts the two kernels' products and sums in other ways.
    contracted = 64 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(chunk, expected, rtol=bound, atol=max(bound * 1e-2, contracted))


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32))
@pytest.mark.parametrize("reduction", ("mean", "sum", "none"))
@pytest.mark.parametrize("label_smoothing", (0.0, 0.1, 1.0))
@pytest.mark.parametrize("has_weight", (False, True))
@pytest.mark.parametrize("ignored", ("none", "some", "all"))
def test_agrees_with_torch(
    dtype: torch.dtype, reduction: str, label_smoothing: float, has_weight: bool, ignored: str
) -> None:
    """With every option that it has, and the gradients of all ignored too."""
    generator = torch.Generator().manual_seed(0)
    x = (4 * torch.randn(7, 33, generator=generator)).to(dtype).requires_grad_()
    target = torch.randint(0, 33, (7,), generator=generator)
    target[{"none": slice(0), "some": slice(2, 5), "all": slice(7)}[ignored]] = 3
    ignore_index = -100 if ignored == "none" else 3
    weight = torch.rand(33, generator=generator).to(dtype) if has_weight else None
    kwargs: dict[str, Any] = {
        "weight": weight,
        "ignore_index": ignore_index,
        "reduction": reduction,
        "label_smoothing": label_smoothing,
    }
    ours, theirs = (
        liger_ops.cross_entropy(x, target, **kwargs),
        F.cross_entropy(x, target, **kwargs),
    )
    assert ours.dtype is dtype and ours.shape == theirs.shape
    torch.testing.assert_close(ours, theirs, equal_nan=True)
    upstream = torch.randn(ours.shape, generator=generator, dtype=dtype)
    ours_dx, theirs_dx = (torch.autograd.grad(loss, x, upstream)[0] for loss in (ours, theirs))
    torch.testing.assert_close(ours_dx, theirs_dx)
    if ignored == "all":
        assert ours.isnan().all() if reduction == "mean" else (ours == 0).all()


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_the_loss_is_float32(dtype: torch.dtype) -> None:
    """As under autocast, where PyTorch casts the logits first; autocast changes nothing here."""
    x = torch.randn(5, 33, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    target = torch.arange(5)
    expected = F.cross_entropy(x.float(), target)
    (expected_dx,) = torch.autograd.grad(expected, x)
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            loss = liger_ops.cross_entropy(x, target)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(torch.autograd.grad(loss, x)[0], expected_dx)


def test_the_other_options_are_their_equations() -> None:
    """The z-loss, weighted and differentiable by itself; token weights; what the mean divides by;
    softcap and scale."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 11, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.rand(11, generator=generator, dtype=torch.float64)
    token_weight = torch.rand(2, 3, generator=generator, dtype=torch.float64)
    target = torch.tensor([[1, -100, 3], [10, 0, 5]])
    items = torch.tensor(4)
    kept = target != -100
    y = 3 * torch.tanh(0.5 * x / 3)
    counts = (token_weight * weight[target.clamp(min=0)])[kept]
    z_loss = (counts * 0.1 * y.logsumexp(-1)[kept].square()).sum() / 4
    nll = F.cross_entropy(y[kept], target[kept], weight, reduction="none")
    loss = (token_weight[kept] * nll).sum() / 4 + z_loss
    outputs = liger_ops.cross_entropy_forward(
        x,
        target,
        weight,
        token_weight,
        items,
        lse_square_scale=0.1,
        softcap=3.0,
        logit_scale=0.5,
    )
    torch.testing.assert_close(outputs[0], loss)
    torch.testing.assert_close(outputs[1], z_loss)
    torch.testing.assert_close(outputs[2], y.logsumexp(-1))
    torch.testing.assert_close(outputs[4], counts.sum())
    for ours, theirs in ((outputs[0], loss), (outputs[1], z_loss)):
        grads = [torch.autograd.grad(value, x, retain_graph=True)[0] for value in (ours, theirs)]
        torch.testing.assert_close(*grads)
    options = (weight, token_weight, None, -100, "mean", 0.0, 0.1, 3.0, 0.5)
    mean = liger_ops.cross_entropy(x, target, *options)
    torch.testing.assert_close(mean, loss * 4 / counts.sum())


@pytest.mark.device_kernels
@pytest.mark.parametrize("shards", (2, 3))
def test_a_vocabulary_on_several_devices(shards: int) -> None:
    """Its loss is made of each shard's lse and target logit, and each shard's gradient of it."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 30, generator=generator).to(DEVICE).requires_grad_()
    target = torch.randint(0, 30, (7,), generator=generator).to(DEVICE)
    target[2] = -100
    kept = (target != -100).float()
    lses, target_logits = [], []
    for i, shard in enumerate(x.chunk(shards, -1)):
        local = target - i * shard.shape[-1]
        local = torch.where((local >= 0) & (local < shard.shape[-1]), local, -100)
        _, _, lse, target_logit, *_ = liger_ops.cross_entropy_forward(shard, local)
        lses.append(lse)
        target_logits.append(target_logit)
    lse = torch.stack(lses).logsumexp(0)
    loss = ((lse - torch.stack(target_logits).sum(0)) * kept).sum() / kept.sum()
    whole = liger_ops.cross_entropy(x, target)
    torch.testing.assert_close(loss, whole)
    grads = [torch.autograd.grad(value, x)[0] for value in (loss, whole)]
    torch.testing.assert_close(*grads)
    assert bool((grads[0][2] == 0).all())


def test_the_gradient_that_is_not_given_is_refused() -> None:
    x, target = torch.zeros(2, 3, requires_grad=True), torch.zeros(2, dtype=torch.int64)
    tensors = {
        "weight": torch.ones(3, requires_grad=True),
        "token_weight": torch.ones(2, requires_grad=True),
        "num_items_in_batch": torch.tensor(2.0, requires_grad=True),
    }
    for name, tensor in tensors.items():
        for logits in (x, x.detach()):
            with pytest.raises(ValueError, match=f"cross_entropy: {name} must not require"):
                liger_ops.cross_entropy(logits, target, **{name: tensor})
        with torch.no_grad():
            liger_ops.cross_entropy(x, target, **{name: tensor})


def test_the_composed_op_is_one_node_and_its_part_is_compiled() -> None:
    seen: list[str] = []
    recorder = Recorder()

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return recorder.backend()(graph, inputs)

    def model(x: Tensor, target: Tensor) -> Tensor:
        return torch.ops.liger.cross_entropy(x, target, label_smoothing=0.1)

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    for rows in (3, 5):
        x = torch.randn(rows, 7, requires_grad=True)
        target = torch.arange(rows)
        losses_ = [f(x, target) for f in (compiled, model)]
        assert torch.equal(*losses_)
        assert torch.equal(*(torch.autograd.grad(loss, x)[0] for loss in losses_))
    assert seen == ["liger.cross_entropy"]
    assert liger_ops_of(recorder.forwards) == {"cross_entropy_forward": 1}
    assert liger_ops_of(recorder.backwards) == {"cross_entropy_backward": 1}


def test_the_composed_op_under_transforms() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 2, 5, generator=generator, dtype=torch.float64)
    target = torch.tensor([1, 4])

    def ours(x: Tensor) -> Tensor:
        return liger_ops.cross_entropy(x, target, label_smoothing=0.1)

    def theirs(x: Tensor) -> Tensor:
        return F.cross_entropy(x, target, label_smoothing=0.1)

    compare = torch.testing.assert_close
    compare(torch.vmap(torch.func.grad(ours))(x), torch.vmap(torch.func.grad(theirs))(x))
    compare(torch.func.hessian(ours)(x[0]), torch.func.hessian(theirs)(x[0]))
    tangent = torch.ones_like(x[0])
    compare(*(torch.func.jvp(f, (x[0],), (tangent * x[1],)) for f in (ours, theirs)))
    inner = x[0].requires_grad_()
    assert torch.autograd.gradcheck(ours, inner) and torch.autograd.gradgradcheck(ours, inner)


def test_the_composed_op_is_documented_and_names_itself() -> None:
    text = liger_ops.cross_entropy.__doc__
    assert all(part in text for part in ("Args:", "Returns:", "Raises:", "Source:", "Example:"))
    assert "cross_entropy" in library.COMPOSED
    with pytest.raises(TypeError, match=r"cross_entropy.*'logits'.*list"):
        liger_ops.cross_entropy([1.0], torch.tensor([0]))


EXTRAS = ("return_z_loss", "return_token_accuracy", "return_predicted_tokens", "return_entropy")


def test_module_is_torchs() -> None:
    generator = torch.Generator().manual_seed(0)
    x, target = torch.randn(6, 5, generator=generator), torch.tensor([0, 1, 2, -1, 4, 0])
    weight = torch.rand(5, generator=generator)
    kwargs: dict[str, Any] = {"ignore_index": -1, "reduction": "sum", "label_smoothing": 0.2}
    ours, theirs = CrossEntropyLoss(weight, **kwargs), torch.nn.CrossEntropyLoss(weight, **kwargs)
    assert isinstance(ours, torch.nn.CrossEntropyLoss)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    torch.testing.assert_close(ours(x, target), theirs(x, target))
    assert repr(ours) == ("CrossEntropyLoss(ignore_index=-1, reduction='sum', label_smoothing=0.2)")


@pytest.mark.parametrize("wanted", EXTRAS)
def test_module_returns_what_it_is_asked_for(wanted: str) -> None:
    x = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0))
    target = x.argmax(-1)
    target[0, 0] = -100
    target[0, 1] = (target[0, 1] + 1) % 5
    output = CrossEntropyLoss(lse_square_scale=0.1, **{wanted: True})(x, target)
    assert isinstance(output, CrossEntropyOutput)
    loss, z_loss, *_, entropy = liger_ops.cross_entropy_forward(
        x, target, lse_square_scale=0.1, return_entropy=True
    )
    expected = {
        "return_z_loss": z_loss,
        "return_token_accuracy": torch.tensor(6 / 7),
        "return_predicted_tokens": x.argmax(-1),
        "return_entropy": entropy,
    }
    assert torch.equal(output.loss, loss)
    for name in EXTRAS:
        value = getattr(output, name.removeprefix("return_"))
        if name == wanted:
            torch.testing.assert_close(value, expected[name])
        else:
            assert value is None


@pytest.mark.parametrize("items", (4, 4.0, torch.tensor(4), torch.tensor(4.0)))
def test_module_divides_by_the_items(items: Tensor | float) -> None:
    x, target = torch.randn(3, 5), torch.tensor([0, 1, -100])
    loss = CrossEntropyLoss()(x, target, num_items_in_batch=items)
    torch.testing.assert_close(loss, F.cross_entropy(x, target, reduction="sum") / 4)


@pytest.mark.parametrize(
    ("change", "message"),
    (
        ({"reduction": "max"}, "reduction must be one of 'none', 'mean', 'sum', got 'max'"),
        ({"label_smoothing": 1.5}, "label_smoothing must be from 0 to 1, got 1.5"),
        ({"lse_square_scale": -1.0}, "lse_square_scale must be a number of at least 0, got -1.0"),
        ({"softcap": 0.0}, "softcap must be a number above 0, got 0.0"),
        ({"logit_scale": NAN}, "logit_scale must be a number above 0, got nan"),
    ),
)
def test_rejects_options(change: dict[str, Any], message: str) -> None:
    case = LossCase(shape=(2, 5), dtype=torch.float32, **change)
    args = (torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64), None, None, None, *case.options)
    op_checks.assert_rejects(OP, args, f"cross_entropy: {message}")
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        CrossEntropyLoss(**change)


def test_rejects() -> None:
    x, target = torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64)
    shape = "cross_entropy: target must have the shape of logits but for its last dimension"
    op_checks.assert_rejects(OP, (x, target[:1]), f"{shape}, (2,), got (1,)")
    op_checks.assert_rejects(
        OP,
        (torch.zeros(2, 0), target),
        "cross_entropy: logits must have at least one class, got (2, 0)",
    )
    op_checks.assert_rejects(
        OP,
        (x, target, None, None, torch.tensor(2), -100, "sum"),
        "cross_entropy: num_items_in_batch must be None but for the reduction 'mean', which"
        " divides by it, got one for 'sum'",
    )
    with pytest.raises(TypeError, match="target must be int64 or int32, got torch.float32"):
        liger_ops.cross_entropy(x, x)
    with pytest.raises(TypeError, match="num_items_in_batch must be a number or a tensor of one"):
        CrossEntropyLoss()(x, target, num_items_in_batch="4")
