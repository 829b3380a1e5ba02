"""The head of a loss: a linear layer, which may have a LoRA.

Here are its tensors, their dtypes under autocast, the chunks of tokens or words in which a loss
computes its logits, and the gradients that a forward has computed, for the definitions and the
kernels' host code. HEAD names the tensors of a head. Masks and gradients have its order.

Products of such a gradient with the backward's factor are here too: ATen converts a bfloat16
gradient element by element where the factor is float32, 1.28 ms for (75968, 4096) on an H100.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...invariant_mode import is_invariant
from ...torch_private import are_functorch_transforms_active
from ..tensors import is_eager

# Device type -> the device's own `scale`, for any dtype but float64.
scales: dict[str, Callable[[Tensor, Tensor, Tensor], None]] = {}


def scale(gradient: Tensor, factor: Tensor, result: Tensor) -> None:
    """Fill result with gradient * factor, multiplied in factor's float32 and rounded once.

    With out=, the float32 product is never in memory.
    """
    torch.mul(gradient, factor, out=result)


def scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return gradient * factor in dtype, by the device's `scale` if nothing is traced.

    The factor must have a dimension: PyTorch would round one without dimensions to gradient's dtype
    first.
    """
    device_scale = _device_scale(gradient, factor)
    if device_scale is None:
        return (gradient * factor).to(dtype)
    result = torch.empty_like(gradient, dtype=dtype)
    device_scale(gradient, factor, result)
    return result


def scale_(gradient: Tensor, factor: Tensor) -> Tensor:
    """Multiply gradient in place, as `scaled` does, and return it."""
    device_scale = _device_scale(gradient, factor)
    if device_scale is None:
        return gradient.mul_(factor)
    device_scale(gradient, factor, gradient)
    return gradient


def _device_scale(
    gradient: Tensor, factor: Tensor
) -> Callable[[Tensor, Tensor, Tensor], None] | None:
    """Return the device's `scale`, or None if it does not take these tensors.

    It is not an op, so the tensors must be plain ones that nothing traces.
    """
    if (
        not is_eager(gradient, factor)
        or gradient.dtype is torch.float64
        or not gradient.is_contiguous()
    ):
        return None
    return scales.get(gradient.device.type, scale)


ENVIRONMENT = "LIGER_OPS_LOGITS_BYTES"
# 8192 x 2048 x 128256 in bfloat16 on an H200, forward and backward: 24.7 ms in chunks of 256 MiB,
# 22.5 ms of 512 MiB, 21.4 ms of 1024 MiB. The first two have the same peak memory.
DEFAULT_BYTES = 512 * 2**20
# The default in a backward, where the gradients are in memory beside the chunk.
BACKWARD_BYTES = 384 * 2**20
# 256 MiB of bfloat16 for 16384 tokens.
INVARIANT_WORDS = 8192

# Matrix products are fastest if their sizes are multiples of the kernels' tiles.
TILE = 128


def chunks(
    M: int, row_bytes: int, chunk_bytes: int | None,
    later_bytes: int = 0, saved_bytes: int = 0, default: int = DEFAULT_BYTES,
) -> Iterator[slice]:  # fmt: skip
    """Split M rows into slices of similar size, each at most `chunk_bytes` but at least one row.

    If neither the caller nor the environment sets a size, it is the larger of `default` and
    `later_bytes`, the memory that is needed after the last chunk in any case. A single slice of all
    rows may then take `saved_bytes` more, the memory that only several slices need. If M is 0,
    there is one empty slice.

    A graph that is traced with a symbolic M gets the number of slices for the M at hand, which
    `torch.compile` guards. It gets one slice if M is data-dependent, and if the graph is for a
    package of AOTInductor, which guards nothing.
    """
    configured = set_bytes(chunk_bytes)
    most = configured or max(default, later_bytes)
    if _holds(M * row_bytes <= (configured or most + saved_bytes)):
        yield slice(0, M)
        return
    fitting = max(1, most // row_bytes)
    unit = TILE if fitting >= TILE else 1
    # As few slices as possible, then the same number of rows in each, rounded up to whole tiles.
    count = int(-(-M // (fitting // unit * unit)))
    rows = -(-M // (count * unit)) * unit
    for i in range(count):
        yield slice(i * rows, M if i == count - 1 else (i + 1) * rows)


def chunks_of_words(V: int, word_bytes: int, chunk_bytes: int | None) -> Iterator[slice]:
    """Split V words into slices of at most `chunk_bytes`, where a word takes `word_bytes`.

    Within `liger_ops.invariant` they have INVARIANT_WORDS words whatever the number of tokens,
    because a token's gradient is a sum over the slices.
    """
    if is_invariant():
        return chunks(V, 1, INVARIANT_WORDS)
    return chunks(V, word_bytes, chunk_bytes, default=BACKWARD_BYTES)


def _holds(fits: bool | torch.SymBool) -> bool:
    """Return whether all rows fit in one slice; True where no guard can decide it."""
    if isinstance(fits, bool):
        return fits
    from torch.fx.experimental.symbolic_shapes import guard_or_true

    from ...torch_private import inductor_state

    return inductor_state.aot_compilation or guard_or_true(fits)


def set_bytes(chunk_bytes: int | None) -> int | None:
    """Return the chunk size in bytes that the caller or else the environment sets, or None."""
    value = os.environ.get(ENVIRONMENT)
    if chunk_bytes or value is None:
        return chunk_bytes or None
    if not value.isdecimal() or int(value) < 1:
        raise ValueError(f"{ENVIRONMENT} must be a number of bytes above 0, got {value!r}")
    return int(value)


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
    # Transforms differentiate the definition, and would not use the forward's gradients.
    in_forward = in_forward and not are_functorch_transforms_active()
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
        for words in chunks_of_words(self.weight.shape[0], self.word_bytes, chunk_bytes):
            part = self.of_words(words)
            yield words, part, part.logits()


def rows_of(x: Tensor) -> Tensor:
    """Flatten all dimensions before the last."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def flat_tokens(values: Tensor, x: Tensor) -> Tensor:
    """Flatten the dimensions of values that are those of x's tokens."""
    tokens = x.shape[:-1]
    return values.reshape((math.prod(tokens), *values.shape[len(tokens) :]))


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
