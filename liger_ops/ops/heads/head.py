"""The head of a loss: a linear layer, which may have a LoRA.

Here are its tensors, their dtypes under autocast, its chunks, and the gradients that a forward has
computed, for the definitions and the kernels' host code. HEAD names the tensors of a head. Masks
and gradients have its order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .chunks import BACKWARD_BYTES, chunks
from .scaling import scaled

HEAD = ("x", "weight", "bias", "lora_x", "lora_b")
GRADIENTS = "dx dweight dbias dlora_x dlora_b"


def cast_for_products(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast tensors as autocast, if it is on, casts the inputs of matrix products."""
    device = tensors[0].device.type
    # is_autocast_enabled raises for a device without autocast. Dynamo of torch 2.11 does not trace
    # is_autocast_available, but every device that it compiles for has autocast.
    has_autocast = torch.compiler.is_compiling() or torch.amp.is_autocast_available(device)
    if not (has_autocast and torch.is_autocast_enabled(device)):
        return tensors
    dtype = torch.get_autocast_dtype(device)

    def cast(tensor: Tensor) -> Tensor:
        lower = tensor.is_floating_point() and tensor.dtype is not torch.float64
        return tensor.to(dtype) if lower else tensor

    return tuple(map(cast, tensors))


def cast_as_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cast x, weight and bias as autocast, if it is on, casts the inputs of a linear layer."""
    tensors = (x, weight) if bias is None else (x, weight, bias)
    cast = cast_for_products(*tensors)
    return cast[0], cast[1], cast[2] if len(cast) > 2 else None


def needed_gradients(tensors: Sequence[Tensor | None], reduction: str) -> list[bool]:
    """Return for each of the head's tensors whether the forward should compute its gradient."""
    in_forward = torch.is_grad_enabled() and reduction != "none"
    return [in_forward and tensor is not None and tensor.requires_grad for tensor in tensors]


def trained(call: Any) -> tuple[str, ...]:
    """Return the names of the trainable head's tensors: HEAD, with "student_" for a divergence."""
    prefix = "student_" if hasattr(call, "student_x") else ""
    return tuple(f"{prefix}{name}" for name in HEAD)


class Head(NamedTuple):
    """The tensors of a head, or of some of its tokens or words.

    x and lora_x have one row per token. The logits are x @ weight.T + bias + lora_x @ lora_b.T.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    lora_x: Tensor | None = None
    lora_b: Tensor | None = None

    @staticmethod
    def of_call(call: Any, prefix: str = "") -> Head:
        """Return the head of a call, with the tokens of x and lora_x in one dimension."""
        x, weight, bias, lora_x, lora_b = (getattr(call, f"{prefix}{name}") for name in HEAD)
        return Head(rows_of(x), weight, bias, None if lora_x is None else rows_of(lora_x), lora_b)

    @property
    def token_bytes(self) -> int:
        """The size in bytes of the logits of one token."""
        return self.weight.shape[0] * self.x.element_size()

    @property
    def word_bytes(self) -> int:
        """The size in bytes of the logits of one word, for all tokens."""
        return self.x.shape[0] * self.x.element_size()

    def of_tokens(self, tokens: slice) -> Head:
        lora_x = None if self.lora_x is None else self.lora_x[tokens]
        return self._replace(x=self.x[tokens], lora_x=lora_x)

    def of_words(self, words: slice) -> Head:
        bias, lora_b = (None if t is None else t[words] for t in (self.bias, self.lora_b))
        return self._replace(weight=self.weight[words], bias=bias, lora_b=lora_b)

    def logits(self) -> Tensor:
        """Compute the logits.

        They are rounded to x's dtype before the product of the LoRA is added, and the sum again.
        """
        logits = torch.nn.functional.linear(self.x, self.weight, self.bias)
        if self.lora_x is not None and self.lora_b is not None:
            logits = torch.addmm(logits, self.lora_x, self.lora_b.t())
        return logits

    def chunks_of_tokens(
        self, chunk_bytes: int | None, other_bytes: int = 0
    ) -> Iterator[tuple[slice, Head, Tensor]]:
        """Yield each chunk of tokens, its part of the head, and the logits.

        A token takes `other_bytes` of the chunk's memory beside its logits.
        """
        for tokens in chunks(self.x.shape[0], self.token_bytes + other_bytes, chunk_bytes):
            part = self.of_tokens(tokens)
            yield tokens, part, part.logits()

    def chunks_of_words(self, chunk_bytes: int | None) -> Iterator[tuple[slice, Head, Tensor]]:
        """Yield each chunk of words, its part of the head, and the logits of all tokens."""
        sizes = (self.weight.shape[0], self.word_bytes, chunk_bytes)
        for words in chunks(*sizes, default=BACKWARD_BYTES):
            part = self.of_words(words)
            yield words, part, part.logits()


def rows_of(x: Tensor) -> Tensor:
    """Flatten all dimensions before the last."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def divisor(call: Any, total_weight: Tensor) -> Tensor | int:
    """Return the number by which the reduction divides the sum of the losses."""
    if call.reduction != "mean":
        return 1
    items = call.num_items_in_batch
    return total_weight if items is None else items.to(total_weight.dtype)


def factors_of(call: Any, divisor: Tensor | int) -> tuple[Tensor, ...]:
    """Return the factors by which the backward multiplies the gradients from the forward.

    They are in the order of HEAD. Without targets all tokens count.
    """
    factor = call.dloss / divisor
    of_rows = factor.reshape(1, 1)
    if call.target is not None:
        # An ignored token has no gradient, even if all are ignored and the mean is NaN.
        kept = call.target != call.ignore_index
        of_rows = torch.where(kept, factor, 0.0).unsqueeze(-1)
        factor = torch.where(kept.any(), factor, 0.0)
    of_weight = factor.reshape(1, 1)
    return of_rows, of_weight, factor.reshape(1), of_rows, of_weight


def finished_in_forward(
    call: Any, divisor: Tensor | int,
    outputs: Sequence[Tensor | None] = (), scale: Callable[..., None] | None = None,
) -> list[Tensor | None]:  # fmt: skip
    """Return the wanted gradients among those that the forward computed; None for the others.

    They are multiplied by dloss and the reduction's factor. A device's `scale` writes the products
    to `outputs`.
    """
    computed = [getattr(call, name) for name in GRADIENTS.split()]
    if call.dloss is None or all(gradient is None for gradient in computed):
        return [None] * len(computed)
    finished: list[Tensor | None] = []
    dtype, factors = getattr(call, trained(call)[0]).dtype, factors_of(call, divisor)
    for i, gradient in enumerate(computed):
        result = None
        if call.output_mask[i] and gradient is not None:
            if scale is None:
                result = scaled(gradient, factors[i], dtype)
            else:
                result = outputs[i]
                scale(gradient, factors[i], result)
        finished.append(result)
    return finished


def still_missing(wanted: list[bool], finished: Sequence[Tensor | None]) -> list[bool]:
    """Return which gradients are wanted, but not yet computed."""
    return [want and gradient is None for want, gradient in zip(wanted, finished, strict=True)]


def first_given(
    first: Sequence[Tensor | None], second: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Take each gradient from `first` or, where that is None, from `second`."""
    return tuple(b if a is None else a for a, b in zip(first, second, strict=True))


def shaped(gradients: Sequence[Tensor | None], call: Any) -> tuple[Tensor | None, ...]:
    """Reshape each gradient to the shape of its argument."""
    tensors = (getattr(call, name) for name in trained(call))
    return tuple(
        None if gradient is None or tensor is None else gradient.reshape(tensor.shape)
        for gradient, tensor in zip(gradients, tensors, strict=True)
    )
