"""The modules give what their loss gives of the log-probabilities of whole logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from liger_ops import losses

D, V, T = 6, 11, 5
SOFTCAP, TEMPERATURE = 4.0, 0.8
PAIRS = {
    "LinearDPOLoss": losses.dpo_loss, "LinearORPOLoss": losses.orpo_loss,
    "LinearCPOLoss": losses.cpo_loss, "LinearSimPOLoss": losses.simpo_loss,
}  # fmt: skip


class Batch:
    """Hidden states and heads of a policy and a reference, and targets of which some are -100."""

    def __init__(self, rows: int = 4) -> None:
        generator = torch.Generator().manual_seed(0)

        def values(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self.x, self.ref_x = values(rows, T, D), values(rows, T, D)
        self.weight, self.ref_weight = values(V, D), values(V, D)
        self.bias, self.ref_bias = values(V), values(V)
        self.tokens = torch.randint(V, (rows, T), generator=generator)
        self.target = self.tokens.masked_fill(values(rows, T) > 0.5, -100)
        self.per_row = values(rows)

    @property
    def head(self) -> tuple[Tensor, ...]:
        return self.x, self.weight, self.target, self.bias

    @property
    def ref(self) -> tuple[Tensor, ...]:
        return self.ref_x, self.ref_weight, self.ref_bias

    def whole(
        self, x: Tensor, weight: Tensor, bias: Tensor, target: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The log-probabilities and entropies from all logits."""
        logits = torch.tanh((x @ weight.T + bias) / SOFTCAP) * SOFTCAP / TEMPERATURE
        log_prob = torch.log_softmax(logits, -1)
        of_targets = log_prob.gather(-1, target.clamp(min=0)[..., None])[..., 0]
        return of_targets, torch.distributions.Categorical(logits=logits).entropy()


HEAD: dict[str, Any] = {"softcap": SOFTCAP, "temperature": TEMPERATURE}


def agree(ours: Any, theirs: Any, batch: Batch) -> None:
    parameters = (batch.x, batch.weight, batch.bias)
    for a, b in zip(ours, theirs, strict=True):
        assert a is b is None or torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5) is None
    gradients = [
        torch.autograd.grad(output.loss, parameters, retain_graph=True) for output in (ours, theirs)
    ]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.fixture
def batch() -> Batch:
    batch = Batch()
    for parameter in (batch.x, batch.weight, batch.bias):
        parameter.requires_grad_()
    return batch


@pytest.mark.parametrize("name", PAIRS)
def test_pairs(name, batch):
    log_prob, _ = batch.whole(batch.x, batch.weight, batch.bias, batch.target)
    module = getattr(losses, name)(beta=0.3, **HEAD)
    theirs = PAIRS[name](log_prob, batch.target != -100, beta=0.3)
    agree(module(*batch.head), theirs, batch)
    assert "beta=0.3" in repr(module)


def test_dpo_with_a_reference(batch):
    mask = batch.target != -100
    policy, _ = batch.whole(batch.x, batch.weight, batch.bias, batch.target)
    ref, _ = batch.whole(*batch.ref, batch.target)
    options = {"loss_type": ["hinge", "bco_pair"], "loss_weights": [0.5, 2.0]}
    module = losses.LinearDPOLoss(**options, **HEAD)
    for parameter in batch.ref:
        parameter.requires_grad_()
    shift = torch.tensor(0.2)
    theirs = losses.dpo_loss(policy, mask, ref, reward_shift=shift, **options)
    ours = module(*batch.head, *batch.ref, reward_shift=shift)
    assert torch.autograd.grad(ours.loss, batch.ref, retain_graph=True, allow_unused=True) == (
        None, None, None,
    )  # fmt: skip
    agree(ours, theirs, batch)
    stored = losses.sequence_log_prob(ref, mask)
    agree(module(*batch.head, ref_log_prob=stored, reward_shift=shift), theirs, batch)


@pytest.mark.parametrize("name", ["LinearORPOLoss", "LinearCPOLoss", "LinearSimPOLoss"])
def test_the_chosen_tokens_loss_may_have_other_targets(name, batch):
    log_prob, _ = batch.whole(batch.x, batch.weight, batch.bias, batch.target)
    nll_target = (batch.tokens + 1) % V
    nll_log_prob, _ = batch.whole(batch.x, batch.weight, batch.bias, nll_target)
    nll_target[:, 0] = -100
    nll = {"nll_mask": nll_target != -100, "nll_log_prob": nll_log_prob}
    theirs = PAIRS[name](log_prob, batch.target != -100, alpha=1.5, **nll)
    module = getattr(losses, name)(alpha=1.5, **HEAD)
    agree(module(*batch.head, nll_target), theirs, batch)


@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_kto(loss_type, batch):
    policy, _ = batch.whole(batch.x, batch.weight, batch.bias, batch.target)
    ref, _ = batch.whole(*batch.ref, batch.target)
    labels, kl = batch.per_row > 0, torch.tensor(0.3) if loss_type == "kto" else None
    options = {"loss_type": loss_type, "undesirable_weight": 0.7}
    theirs = losses.kto_loss(policy, batch.target != -100, labels, ref, kl, **options)
    module = losses.LinearKTOLoss(**options, **HEAD)
    x, weight, target, bias = batch.head
    agree(module(x, weight, target, labels, bias, *batch.ref, kl=kl), theirs, batch)


@pytest.mark.parametrize("loss_type", ["dapo", "vespo"])
def test_grpo(loss_type, batch):
    mask = batch.target != -100
    policy, entropy = batch.whole(batch.x, batch.weight, batch.bias, batch.target)
    ref, _ = batch.whole(*batch.ref, batch.target)
    old = (policy + 0.1).detach()
    options = {"loss_type": loss_type, "beta": 0.2, "entropy_coef": 0.3, "delta": None}
    tensors = {"old_log_prob": old, "num_items_in_batch": torch.tensor(9)}
    theirs = losses.grpo_loss(
        policy, batch.per_row, mask, ref_log_prob=ref, entropy=entropy, **tensors, **options
    )
    module = losses.LinearGRPOLoss(**options, **HEAD)
    x, weight, target, bias = batch.head
    agree(module(x, weight, target, batch.per_row, bias, *batch.ref, **tensors), theirs, batch)


@pytest.mark.parametrize("name", ["LinearGRPOLoss", "LinearORPOLoss"])
def test_one_graph_for_all_sizes(empty_caches, name):
    from torch._dynamo.testing import CompileCounter

    module = getattr(losses, name)()
    counter = CompileCounter()
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=counter)
    for rows in (4, 6):
        batch = Batch(rows)
        arguments = [*batch.head, batch.tokens]
        if name == "LinearGRPOLoss":
            arguments[3:] = batch.per_row, batch.bias
        torch.testing.assert_close(compiled(*arguments).loss, module(*arguments).loss)
    assert counter.frame_count == 1


def test_refused():
    with pytest.raises(ValueError, match="dpo_loss: loss_type must be one of sigmoid"):
        losses.LinearDPOLoss(loss_type="kto")
    with pytest.raises(ValueError, match="grpo_loss: epsilon_high must be a number for cispo"):
        losses.LinearGRPOLoss(loss_type="cispo")
    with pytest.raises(TypeError, match="unexpected keyword argument 'gama'"):
        losses.LinearSimPOLoss(gama=1.0)
    batch = Batch()
    module = losses.LinearDPOLoss()
    with pytest.raises(ValueError, match="LinearDPOLoss: ref_log_prob must be None beside ref_x"):
        module(*batch.head, *batch.ref, ref_log_prob=torch.zeros(4, T))
    with pytest.raises(TypeError, match="LinearDPOLoss: ref_weight must be a tensor, got NoneType"):
        module(*batch.head, batch.ref_x)
    with pytest.raises(ValueError, match="LinearCPOLoss: nll_target must be of target's shape"):
        losses.LinearCPOLoss()(*batch.head, batch.target[:2])


@pytest.mark.parametrize("name", [*PAIRS, "LinearGRPOLoss"])
def test_nothing_kept_is_a_zero_with_zero_gradients(name, batch):
    nothing = torch.full_like(batch.target, -100)
    more = (batch.per_row,) if name == "LinearGRPOLoss" else ()
    loss = getattr(losses, name)()(batch.x, batch.weight, nothing, *more, batch.bias).loss
    loss.backward()
    assert loss.item() == 0
    assert not any(p.grad.any() for p in (batch.x, batch.weight, batch.bias))


@pytest.mark.parametrize("name", [*PAIRS, "LinearKTOLoss", "LinearGRPOLoss"])
def test_a_lora_of_the_head_and_of_the_reference(name, batch):
    """The same as with the adapted weights; the reference has the policy's LoRA only if given."""
    generator = torch.Generator().manual_seed(1)
    a, b, ref_b = (torch.randn(shape, generator=generator) for shape in ((3, D), (V, 3), (V, 3)))
    for adapter in (a, b):
        adapter.requires_grad_()
    x, weight, target, bias = batch.head
    positional = {"LinearKTOLoss": [batch.per_row > 0], "LinearGRPOLoss": [batch.per_row]}.get(
        name, []
    )
    module = getattr(losses, name)(**({"loss_type": "apo_zero_unpaired"} if "KTO" in name else {}))
    adapted = [x, weight + 0.5 * b @ a, target, *positional, bias]
    plain = [x, weight.detach(), target, *positional, bias]
    of_loras = [{}]
    if name in ("LinearDPOLoss", "LinearKTOLoss", "LinearGRPOLoss"):
        of_loras = [{}, {"ref_lora": (a, ref_b, 2.0)}]
    for lora in of_loras:
        ref_x, ref_weight, ref_bias = batch.ref
        ref, whole_ref = {}, {}
        if len(of_loras) > 1:
            ref = {"ref_x": ref_x, "ref_weight": ref_weight, "ref_bias": ref_bias}
            added = 2.0 * ref_b @ a if lora else 0.0
            whole_ref = {**ref, "ref_weight": ref_weight + added}
        ours = module(*plain, lora=(a, b, 0.5), **ref, **lora)
        theirs = module(*adapted, **whole_ref)
        torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-4, atol=1e-5)
        gradients = [
            torch.autograd.grad(one.loss, (x, a, b), retain_graph=True) for one in (ours, theirs)
        ]
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_a_lora_that_is_none(batch):
    loss = losses.LinearDPOLoss()
    with pytest.raises(
        TypeError, match=r"LinearDPOLoss: lora must be a tuple \(lora_a, lora_b, lora"
    ):
        loss(*batch.head, lora=batch.weight)
    with pytest.raises(ValueError, match="LinearDPOLoss: ref_lora must be None without ref_x"):
        loss(*batch.head, ref_lora=(batch.weight, batch.weight, 1.0))
    with pytest.raises(ValueError, match="linear_log_prob: lora_a must be .R, D. with D of x"):
        loss(*batch.head, lora=(batch.weight[:, :2], batch.weight, 1.0))
