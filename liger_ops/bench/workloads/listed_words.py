"""linear_top_k_divergence: the head of a student and the words that its teacher lists;
linear_score_centering: a policy's head and the words that its sampler lists; and linear_top_k,
which lists a head's own."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import torch
from torch import Tensor

import liger_ops

from .entry import Draw, Entry, Function, Shape, wide
from .losses import OF_HEADS, model_jsd, x_weight_and_target

# The number of words that are listed for a token.
K = 16


def _log_prob(ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the teacher's log-probabilities, which fall with the rank of a word; the probabilities
    sum to 0.9."""
    rank = torch.arange(K, device=ids.device, dtype=dtype)
    probabilities = 0.9 * (-0.3 * rank).softmax(-1)
    return probabilities.log().expand(ids.shape)


def model_head_and_listed_words(x: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """Compute the mean Jensen-Shannon divergence as trainers do; all other words are one class."""
    log_q = wide(x @ weight.T).log_softmax(-1).gather(-1, ids)
    sides = (log_q, _log_prob(ids, log_q.dtype))
    tails = (torch.log1p(-side.exp().sum(-1, keepdim=True)) for side in sides)
    return model_jsd(*(torch.cat(pair, -1) for pair in zip(sides, tails, strict=True)))


def model_top_k(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Compute the sum of the log-probabilities of a head's most probable words. The target, by
    whose rows the truth is computed, is not used."""
    return wide(x @ weight.T).log_softmax(-1).topk(K, -1).values.sum(-1)


def _top_k(x: Tensor, weight: Tensor, target: Tensor, **options: Any) -> Tensor:
    return liger_ops.linear_top_k(x, weight, K, **options)[1].sum(-1)


def _mean(x: Tensor, weight: Tensor, ids: Tensor, **options: Any) -> Tensor:
    return liger_ops.linear_top_k_divergence(x, weight, ids, _log_prob(ids), **options).mean()


def _advantages(words: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return advantages from -2 to 2, which depend on the sampled word."""
    return (words[:, 0] % 5 - 2).to(dtype)


def model_centred_score(x: Tensor, weight: Tensor, words: Tensor) -> Tensor:
    """Compute the mean policy loss with a centred score. The words of a token are the sampled one
    and the K that the sampler lists."""
    log_p = wide(x @ weight.T).log_softmax(-1).gather(-1, words)
    sampled, listed = log_p[:, 0], log_p[:, 1:]
    p, q = listed.detach().exp(), _log_prob(words[:, 1:], log_p.dtype).exp()
    rho = (1 - q.sum(-1, keepdim=True)) / (1 - p.sum(-1, keepdim=True))
    centre = ((q - rho * p) * listed).sum(-1)
    return (-_advantages(words, log_p.dtype) * (sampled - centre)).mean()


def _centred(x: Tensor, weight: Tensor, words: Tensor, **options: Any) -> Tensor:
    sampled, listed = words[:, 0], words[:, 1:]
    sampling = (_log_prob(listed), _advantages(words))
    return liger_ops.linear_score_centering(x, weight, sampled, listed, *sampling, **options)[0]


def _trl(package: Any) -> Function:
    root = package.__name__.split(".")[0]
    module = importlib.import_module(
        f"{root}.experimental.async_distillation.async_distillation_trainer"
    )

    def divergence(x: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
        head, teacher = (x, weight, None, 1.0, None), (ids, _log_prob(ids), ids >= 0)
        chunk = module._CHUNKED_LM_HEAD_CHUNK_SIZE
        return module._chunked_jsd_loss(*head, *teacher, 0.5, 1.0, True, None, 1, chunk)[0] / len(x)

    return divergence


def _inputs(draw: Draw, shape: Shape, count: int = K) -> list[Tensor]:
    x, weight, first = x_weight_and_target(draw, shape)
    return [x, weight, (first.unsqueeze(-1) + torch.arange(count, device=x.device)) % shape[2]]


def _with_top_words(draw: Draw, shape: Shape) -> list[Tensor]:
    """Draw a head whose first K words are the most probable ones, in every dtype: other words would
    have other gradients."""
    rows, width, classes = shape
    x, weight = draw.leaf(rows, width), draw.leaf(classes, width, scale=0.1 * width**-0.5)
    with torch.no_grad():
        x[:, 0], weight[:, 0], weight[:K, 0] = 1, 0, 1
    return [x, weight, draw.classes(rows, classes)]


ENTRIES = (
    Entry(
        op="linear_score_centering",
        ours=_centred,
        low_memory=lambda x, *others: _centred(x, *others, accum_dtype=x.dtype),
        eager=model_centred_score,
        **{**OF_HEADS, "inputs": partial(_inputs, count=K + 1)},
    ),
    Entry(
        op="linear_top_k",
        ours=_top_k,
        low_memory=lambda x, *others: _top_k(x, *others, accum_dtype=x.dtype),
        eager=model_top_k,
        **{**OF_HEADS, "inputs": _with_top_words},
    ),
    Entry(
        op="linear_top_k_divergence",
        ours=_mean,
        low_memory=lambda x, *others: _mean(x, *others, accum_dtype=x.dtype),
        eager=model_head_and_listed_words,
        peers={"trl": _trl},
        **{**OF_HEADS, "inputs": _inputs},
    ),
)
