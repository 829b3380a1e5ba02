"""Every loss has one compilation for all sizes, and zero of a batch without tokens."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from liger_ops import losses
from liger_ops.losses.policy_terms import POLICY_TERMS
from loss_calls import CALLS, inputs

each_loss = pytest.mark.parametrize("name", CALLS)


def with_gradient(call, x, compiled=None):
    log_prob = x["log_prob"].clone().requires_grad_()
    output = (compiled or call)({**x, "log_prob": log_prob})
    (gradient,) = torch.autograd.grad(output.loss, log_prob)
    return [*(value for value in output if value is not None), gradient]


@each_loss
def test_one_graph_for_all_sizes(name, empty_caches):
    counter = CompileCounter()
    compiled = torch.compile(CALLS[name], fullgraph=True, dynamic=True, backend=counter)
    for rows, tokens in ((4, 5), (6, 3)):
        x = inputs(rows, tokens)
        values = with_gradient(CALLS[name], x, compiled)
        for value, truth in zip(values, with_gradient(CALLS[name], x), strict=True):
            torch.testing.assert_close(value, truth)
    assert counter.frame_count == 1


@pytest.mark.parametrize("loss_type", POLICY_TERMS)
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_one_graph_for_a_number_of_tokens_that_only_the_data_knows(loss_type, empty_caches):
    """Packed tokens, (1, N), that a mask has chosen: N is an unbacked size while tracing."""

    def packed(x):
        chosen = x["mask"].flatten().nonzero()[:, 0]
        of_tokens = {
            key: x[key].flatten().index_select(0, chosen)[None]
            for key in ("log_prob", "old_log_prob", "ref_log_prob", "entropy", "vllm_is_ratio")
        }
        mask = torch.ones_like(of_tokens["log_prob"], dtype=torch.bool)
        one = {"advantages": x["advantages"][:1], "items": x["items"], "mask": mask}
        return CALLS[f"grpo-{loss_type}"]({**of_tokens, **one})

    counter = CompileCounter()
    compiled = torch.compile(packed, fullgraph=True, dynamic=True, backend=counter)
    for seed in range(2):
        x = inputs(4, 5, seed)
        torch.testing.assert_close(compiled(x).loss, packed(x).loss)
    assert counter.frame_count == 1


@each_loss
@pytest.mark.parametrize("rows", [4, 0])
def test_nothing_kept_is_a_zero_with_zero_gradients(name, rows):
    x = inputs(rows, 3)
    x["mask"] = torch.zeros_like(x["mask"])
    for key in ("log_prob", "old_log_prob", "ref_log_prob", "entropy", "vllm_is_ratio"):
        x[key] = torch.full_like(x[key], torch.nan)
    log_prob = x["log_prob"].requires_grad_()
    loss = CALLS[name](x).loss
    loss.backward()
    assert loss.item() == 0 and not log_prob.grad.any()


@each_loss
def test_only_the_policy_has_a_gradient(name):
    x = inputs(4, 5)
    names = [key for key, value in x.items() if value.is_floating_point()]
    tensors = [x[key].requires_grad_() for key in names]
    gradients = torch.autograd.grad(CALLS[name](x).loss, tensors, allow_unused=True)
    has = {key for key, gradient in zip(names, gradients, strict=True) if gradient is not None}
    assert has == ({"log_prob", "entropy"} if name.startswith("grpo") else {"log_prob"})


@each_loss
def test_low_precision_is_widened(name):
    """bfloat16 gives what its values give in float32."""
    x = inputs(4, 5)
    narrow = {k: v.bfloat16() if k.endswith("log_prob") else v for k, v in x.items()}
    wide = {k: v.float() if k.endswith("log_prob") else v for k, v in narrow.items()}
    for a, b in zip(CALLS[name](narrow), CALLS[name](wide), strict=True):
        assert a is b is None or torch.equal(a, b)


def test_every_loss_is_called():
    public = {name.removesuffix("_loss") for name in losses.__all__ if name.endswith("_loss")}
    assert public == {name.split("-")[0] for name in CALLS}
    assert len(CALLS) == 15 + 4 + 3 + 2 + 8 + 3
