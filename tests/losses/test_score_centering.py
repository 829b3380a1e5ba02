"""score_centering_loss against its equation over the whole vocabulary, in float64."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

import liger_ops
from liger_ops.losses import LinearScoreCenteringLoss, score_centering_loss
from liger_ops.ops.losses.score_centering import LEAST_TAIL

B, T, V, D = 3, 4, 13, 6
DTYPE = torch.float64
BOUNDS = {"importance_min": 0.5, "importance_max": 1.5}


def weigh(ratio: Tensor, kind: str) -> Tensor:
    low, high = BOUNDS["importance_min"], BOUNDS["importance_max"]
    if kind == "truncate":
        return ratio.clamp(low, high)
    if kind == "mask":
        return ratio * ((ratio >= low) & (ratio <= high))
    return torch.ones_like(ratio)


class Batch:
    """A policy's logits and a sampler's, which differ, and sampled words."""

    def __init__(self, K: int, seed: int = 0, apart: float = 0.5) -> None:
        generator = torch.Generator().manual_seed(seed)

        def values(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=DTYPE)

        self.logits = (2 * values(B, T, V)).requires_grad_()
        self.log_q = (self.logits.detach() + apart * values(B, T, V)).log_softmax(-1)
        q = self.log_q.exp().view(-1, V)
        self.target = torch.multinomial(q, 1, generator=generator).view(B, T)
        self.sampling_log_prob, self.words = self.log_q.topk(K)
        self.advantages, self.mask = values(B, T), values(B, T) < 0.8
        self.mask[0, 0] = True

    def listed(self) -> Tensor:
        """Return whether each word of the vocabulary is listed."""
        none = torch.zeros(B, T, V, dtype=torch.bool)
        return none.scatter(-1, self.words, self.sampling_log_prob != -torch.inf)

    def tail(self, log_p: Tensor) -> Tensor:
        return (log_p.exp() * ~self.listed()).sum(-1)

    def of_sampled(self, log_p: Tensor) -> Tensor:
        return log_p.gather(-1, self.target.unsqueeze(-1)).squeeze(-1)

    def loss(self, **options: Any) -> Any:
        targets = torch.cat([self.target.unsqueeze(-1), self.words], -1)
        log_prob, _ = liger_ops.log_prob(self.logits, targets)
        return score_centering_loss(
            log_prob[..., 0], log_prob[..., 1:], self.sampling_log_prob, self.advantages,
            self.mask, sampling_log_prob=self.of_sampled(self.log_q), **options,
        )  # fmt: skip

    def truth(self, kind: str) -> Tensor:
        """A loss of the whole vocabulary with the same gradient: the tail of q is rho * p."""
        log_p = self.logits.log_softmax(-1)
        p, q, listed = log_p.detach().exp(), self.log_q.exp(), self.listed()
        tails = [self.tail(x.log()).unsqueeze(-1) for x in (q, p)]
        # Where every word is listed, the ratio of tails is NaN and not taken.
        q = torch.where(listed, q, p * tails[0] / tails[1])
        centre = (q * weigh(p / q, kind) * log_p).sum(-1)
        weight = weigh(self.of_sampled(log_p.detach() - self.log_q).exp(), kind)
        losses = -self.advantages * (weight * self.of_sampled(log_p) - centre)
        return (losses * self.mask).sum() / self.mask.sum()


KINDS = pytest.mark.parametrize("kind", ("none", "truncate", "mask"))


@KINDS
@given(K=st.integers(1, V), seed=st.integers(0, 2**31), apart=st.sampled_from((0.0, 0.1, 1.0)))
def test_its_gradient_is_that_of_the_whole_vocabulary(
    kind: str, K: int, seed: int, apart: float
) -> None:
    batch = Batch(K, seed, apart)
    # The loss bounds smaller tails.
    tails = (batch.tail(x) for x in (batch.logits.detach().log_softmax(-1), batch.log_q))
    assume(K == V or all(bool((tail > LEAST_TAIL).all()) for tail in tails))
    (ours,) = torch.autograd.grad(batch.loss(importance_sampling=kind, **BOUNDS).loss, batch.logits)
    (theirs,) = torch.autograd.grad(batch.truth(kind), batch.logits)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)


@KINDS
def test_the_mean_of_the_score_is_zero(kind: str) -> None:
    """With every word listed, the gradients of all words, weighted with q, sum to zero."""
    batch = Batch(V)
    batch.mask[:], batch.advantages[:] = True, 1.0
    total = torch.zeros_like(batch.logits)
    for word in range(V):
        batch.target = torch.full((B, T), word)
        losses = batch.loss(importance_sampling=kind, **BOUNDS).per_token_loss
        q = batch.log_q[..., word].exp()
        total += torch.autograd.grad((q * losses).sum(), batch.logits)[0]
    torch.testing.assert_close(total, torch.zeros_like(total), rtol=0, atol=1e-12)
    assert batch.loss().listed > 1 - 1e-9


def test_without_a_difference_it_is_reinforce() -> None:
    """p = q has a centre of zero."""
    batch = Batch(4, apart=0.0)
    (ours,) = torch.autograd.grad(batch.loss().loss, batch.logits)
    log_p = batch.of_sampled(batch.logits.log_softmax(-1))
    plain = -(batch.advantages * log_p * batch.mask).sum() / batch.mask.sum()
    torch.testing.assert_close(ours, torch.autograd.grad(plain, batch.logits)[0])


def test_entries_of_no_probability_are_left_out() -> None:
    batch, shorter = Batch(5), Batch(3)
    batch.sampling_log_prob[..., 3:] = -torch.inf
    for a, b in zip(batch.loss(), shorter.loss(), strict=True):
        torch.testing.assert_close(a, b)


def test_a_confident_policy_has_finite_gradients() -> None:
    """In float32 the listed probabilities of either sum to 1 or more."""
    logits = torch.zeros(1, 1, 9)
    logits[..., :2] = 40.0
    logits.requires_grad_()
    words = torch.arange(3)[None, None]
    log_prob, _ = liger_ops.log_prob(logits, words)
    for other in (-0.7, -0.5, -30.0):
        sampled = torch.tensor([[[other, -0.7, -40.0]]])
        loss = score_centering_loss(
            log_prob[..., 0], log_prob, sampled, torch.ones(1), torch.ones(1, 1)
        ).loss
        (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
        assert loss.isfinite() and gradient.isfinite().all() and gradient.abs().max() < 2


@KINDS
def test_the_module_is_the_loss_of_whole_logits(kind: str) -> None:
    batch = Batch(4)
    x = torch.randn(B, T, D, dtype=DTYPE, requires_grad=True)
    weight = torch.randn(V, D, dtype=DTYPE, requires_grad=True)
    batch.logits = x @ weight.T
    batch.sampling_log_prob[1, :, 2:] = -torch.inf
    target = batch.target.masked_fill(~batch.mask, -100)
    # Words that are left out are never read.
    words = batch.words.masked_fill(batch.sampling_log_prob == -torch.inf, -7)
    words[~batch.mask] = 10**6
    module = LinearScoreCenteringLoss(importance_sampling=kind, **BOUNDS)
    ours = module(
        x, weight, target, words, batch.sampling_log_prob, batch.advantages,
        sampling_log_prob=batch.of_sampled(batch.log_q),
    )  # fmt: skip
    theirs = batch.loss(importance_sampling=kind, **BOUNDS)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
    grads = [torch.autograd.grad(output.loss, (x, weight)) for output in (ours, theirs)]
    torch.testing.assert_close(*grads)


class Head:
    """A head, and a batch whose logits are its."""

    def __init__(self, K: int = 4) -> None:
        self.batch = batch = Batch(K)
        self.x = torch.randn(B, T, D, dtype=DTYPE, requires_grad=True)
        self.weight = torch.randn(V, D, dtype=DTYPE, requires_grad=True)
        batch.logits = self.x @ self.weight.T
        self.target = batch.target.masked_fill(~batch.mask, -100)

    def of_module(self, module: Any = None, **tensors: Any) -> Any:
        batch = self.batch
        given = {
            "target": self.target, "words": batch.words, "advantages": batch.advantages,
            "sampling_top_log_prob": batch.sampling_log_prob, **tensors,
        }  # fmt: skip
        module = LinearScoreCenteringLoss() if module is None else module
        return module(self.x, self.weight, **given)

    def agree(self, ours: Any, theirs: Any) -> None:
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b)
        for name in ("loss", "per_token_loss"):
            values = (getattr(output, name).sin().sum() for output in (ours, theirs))
            leaves = (self.x, self.weight)
            grads = [torch.autograd.grad(v, leaves, retain_graph=True) for v in values]
            torch.testing.assert_close(*grads)


@pytest.mark.parametrize("items", (None, 7, 0.5, torch.tensor(3), torch.tensor([40.0])))
@pytest.mark.parametrize("shape", ((B,), (B, 1), (B, T)))
def test_the_modules_divisor_and_advantages(items: Any, shape: tuple[int, ...]) -> None:
    head = Head()
    head.batch.advantages = torch.randn(shape, dtype=DTYPE)
    ours = head.of_module(num_items_in_batch=items)
    head.agree(ours, head.batch.loss(num_items_in_batch=items))


def test_the_module_without_kept_tokens_and_without_listed_words() -> None:
    head = Head(0)
    head.agree(head.of_module(), head.batch.loss())
    head = Head()
    head.batch.mask[:], head.target[:] = False, -100
    head.batch.advantages = torch.ones(B, dtype=torch.int64)
    ours = head.of_module()
    assert ours.loss == 0 and not ours.per_token_loss.any()
    head.agree(ours, head.batch.loss())


def test_a_word_that_is_listed_again_is_left_out() -> None:
    head = Head()
    words = torch.cat([head.batch.words, head.batch.words[..., :2]], -1)
    top = torch.cat([head.batch.sampling_log_prob, head.batch.sampling_log_prob[..., 1:3]], -1)
    head.agree(head.of_module(words=words, sampling_top_log_prob=top), head.batch.loss())


def test_the_module_takes_a_lora_and_is_compiled_whole() -> None:
    head = Head()
    a, b = torch.randn(2, D, dtype=DTYPE), torch.randn(V, 2, dtype=DTYPE)
    ours = head.of_module(lora=(a, b, 0.7))
    head.batch.logits = head.x @ (head.weight + 0.7 * b @ a).T
    head.agree(ours, head.batch.loss())
    torch._dynamo.reset()
    compiled = torch.compile(LinearScoreCenteringLoss(), fullgraph=True, backend="aot_eager")
    head.agree(head.of_module(compiled), head.of_module())


def test_the_module_names_wrong_arguments() -> None:
    head = Head()
    name = "LinearScoreCenteringLoss: "
    for tensors, message in (
        ({"advantages": torch.ones(B + 1)}, f"{name}advantages must be of shape (B,), (B, 1) or"),
        ({"words": head.batch.words[:1]}, f"{name}words must be of sampling_top_log_prob's shape"),
        ({"num_items_in_batch": torch.ones(2)}, f"{name}num_items_in_batch must be a number or"),
        ({"sampling_log_prob": torch.ones(1)}, "linear_score_centering: sampling_log_prob must ha"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            head.of_module(**tensors)
    with pytest.raises(TypeError, match="sampling_log_prob must be a tensor if importance_sampl"):
        head.of_module(LinearScoreCenteringLoss(importance_sampling="mask"))


@pytest.mark.parametrize("kind", ("truncate", "mask"))
def test_bounds_may_be_infinite(kind: str) -> None:
    """The ratio of a listed word that the sampler nearly excludes is infinite in float32."""
    log_p = torch.tensor([[[0.3, 0.2]]]).log()
    log_q = torch.tensor([[[0.5, 1e-44]]]).log()
    tokens = torch.tensor([[0.4]]).log()

    def gradient(high: float, dtype: torch.dtype) -> Tensor:
        top = log_p.to(dtype).requires_grad_()
        output = score_centering_loss(
            tokens.to(dtype), top, log_q.to(dtype), torch.ones(1), torch.ones(1, 1),
            sampling_log_prob=tokens, importance_sampling=kind, importance_max=high,
        )  # fmt: skip
        return torch.autograd.grad(output.loss, top)[0]

    for high in (torch.inf, 1e38):
        expected = gradient(high, torch.float64)
        assert expected.isfinite().all()
        torch.testing.assert_close(gradient(high, torch.float32).double(), expected)
