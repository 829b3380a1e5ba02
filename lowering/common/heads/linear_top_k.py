"""linear_top_k on a device: PyTorch's matrix products and `torch.topk`, and between them the row
functions of the device's cross_entropy. The backward is that of linear_log_prob."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .... import library
from ....ops.heads import linear_top_k
from ....ops.heads.head import Head
from ....ops.losses.log_prob import tempered
from ..losses.cross_entropy import IGNORED, TokenTensors, loss_of_tokens
from ..losses.words import word_log_probs
from . import linear_log_prob
from .chunked_head import Device, Outputs, chunked_tokens


def forward(device: Device, call: Any) -> tuple[Tensor, ...]:
    log_prob, lse, words, error = library.allocate("linear_top_k_forward", call)
    head, bounds = Head.of_call(call), (call.accum_dtype, call.chunk_bytes)
    options = tempered(call.temperature, call.softcap, call.logit_scale)
    loss, M = loss_of_tokens(IGNORED, *options), head.x.shape[0]
    rows_of_log_prob, rows_of_words = log_prob.view(M, call.k), words.view(M, call.k)
    # The kernel also computes a log-probability, of word 0, which is not used.
    tokens = TokenTensors(
        None, torch.zeros(M, dtype=torch.int64, device=lse.device), None,
        lse=lse.view(-1), lse_error=error.view(-1), log_prob=torch.empty_like(lse.view(-1)),
    )  # fmt: skip
    for chunk, _, logits in chunked_tokens(head, None, device.alignment, *bounds).logits():
        part = tokens.chunk(chunk)
        device.cross_entropy.loss_and_gradient(loss, logits, part, False)
        columns = linear_top_k.most_probable(logits, call.k)
        rows_of_words[chunk] = columns
        rows_of_log_prob[chunk] = word_log_probs(loss, logits, columns, part)
    return log_prob, lse, words, error


def backward(device: Device, call: Any) -> Outputs:
    return linear_log_prob.backward(device, linear_top_k.as_log_prob(call))
