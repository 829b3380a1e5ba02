"""The rows of the experts of a mixture, their products, and the gradients that follow from these.

The definition computes by them, and so does a device with grouped products of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import library
from ...autograd import is_differentiated, vector_jacobian
from ...record import Op
from ..tensors import dense, is_eager, is_transposed, widened

# Activation -> the op that computes it, and that op's options. The options of clamped_swiglu are
# arguments of the call.
ACTIVATIONS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "silu": ("swiglu", (1.0, 1.0)),
    "gelu": ("geglu", ("none",)),
    "gelu_tanh": ("geglu", ("tanh",)),
    "clamped_swiglu": ("clamped_swiglu", ()),
    "relu_squared": ("relu_squared", ()),
}
GRADIENTS = (
    "dx dgate_up ddown dtop_k_weights dgate_up_bias ddown_bias dgate_up_lora_a dgate_up_lora_b"
    " ddown_lora_a ddown_lora_b"
)


def sort(top_k_index: Tensor, E: int, dtype: torch.dtype = torch.int64) -> tuple[Tensor, Tensor]:
    """Return `order` and `offsets`, as `moe_experts_forward` does; ids are sorted in `dtype`."""
    ids = top_k_index.flatten()
    ids = ids.where((ids >= 0) & (ids < E), E).to(dtype)
    ids, order = ids.sort(stable=True)
    ends = torch.arange(E + 1, dtype=dtype, device=ids.device)
    return order.int(), torch.searchsorted(ids, ends).int()


def of_biases(call: Any, dy: Tensor) -> Tensor:
    """Return the part of the gradient of the router's weights, (T, K), that is due to down_bias."""
    bias, ids = call.down_bias.t(), call.top_k_index.long()
    if dy.is_cuda and dy.dtype is torch.bfloat16:
        products = torch.ops.aten.mm.dtype(dy, bias, torch.float32)
    else:
        products = widened(dy) @ widened(bias)
    exists = (ids >= 0) & (ids < bias.shape[1])
    return products.gather(1, ids.where(exists, 0)).where(exists, 0.0)


class ExpertRows:
    """The rows of tokens of a call's experts, in the order of the experts.

    The rows of an expert are together, and those of sentinels are last. The products are a loop
    over the experts here; a subclass may have grouped products instead.
    """

    def __init__(self, call: Any, order: Tensor, offsets: Tensor) -> None:
        self.call, self.order, self.offsets = call, order, offsets
        ids, self.E = call.top_k_index, call.down.shape[0]
        self.tokens = order // max(1, ids.shape[1])
        # The inverse of order: for each position t * K + k, the row that it has.
        numbers = torch.arange(order.numel(), dtype=torch.int32, device=order.device)
        self.places = torch.empty_like(numbers).scatter(0, order.long(), numbers)
        # A sentinel's weight may have any value, even NaN.
        self.exists = (ids >= 0) & (ids < self.E)
        self.weights = widened(call.top_k_weights).where(self.exists, 0.0).contiguous()

    @cached_property
    def sizes(self) -> list[int]:
        """The numbers of rows of each expert, then of sentinels, read from the device."""
        n = self.order.numel()
        if self.order.is_meta:
            # Meta tensors have no values. Any sizes give the same number of operations.
            return [n, *[0] * self.E]
        return [end - start for start, end in pairwise([*self.offsets.tolist(), n])]

    def of_tokens(self, x: Tensor) -> Tensor:
        """Gather the rows of tokens in the order of the experts."""
        return x.index_select(0, self.tokens)

    def by_expert(self, values: Tensor) -> Tensor:
        """Reorder numbers (T, K), one for each row, to the order of the experts."""
        return values.flatten().index_select(0, self.order)

    def product_of_rows(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x @ weight[e].T + bias[e] for the rows of each expert.

        The shapes are (n, K), (E, N, K), (E, N) -> (n, N). The rows of sentinels are zeros here; a
        subclass may leave any values in them.
        """
        # unbind, because its gradient is one stack. The gradient of weight[e] would be a tensor of
        # all experts, for each expert.
        biases = [None] * self.E if bias is None else bias.unbind()
        parts = zip(x.split(self.sizes), weight.unbind(), biases, strict=False)
        if is_eager(x, weight):
            # Each product is written to its rows of y, where cat would copy all of them.
            y = x.new_empty(x.shape[0], weight.shape[1])
            *outputs, sentinels = y.split(self.sizes)
            sentinels.zero_()
            for out, (rows, w, b) in zip(outputs, parts, strict=True):
                if b is None:
                    torch.mm(rows, w.t(), out=out)
                else:
                    torch.addmm(b, rows, w.t(), out=out)
            return y
        sentinels = x.new_zeros(self.sizes[-1], weight.shape[1])
        return torch.cat([*(F.linear(rows, w, b) for rows, w, b in parts), sentinels])

    def product_over_rows(self, a: Tensor, b: Tensor) -> Tensor:
        """Return a.T @ b of the rows of each expert: (n, P), (n, Q) -> (E, P, Q)."""
        parts = zip(a.split(self.sizes)[:-1], b.split(self.sizes), strict=False)
        if is_eager(a, b):
            y = a.new_empty(self.E, a.shape[1], b.shape[1])
            for out, (left, right) in zip(y, parts, strict=True):
                torch.mm(left.t(), right, out=out)
            return y
        return torch.stack([left.t() @ right for left, right in parts])

    def sums(self, rows: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return each expert's sum of its rows, times `weights`, which are in the rows' order."""
        wide = widened(rows) if weights is None else widened(rows) * weights.unsqueeze(1)
        return torch.stack([part.sum(0) for part in wide.split(self.sizes)[:-1]]).to(rows.dtype)

    def combine(self, rows: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return each token's sum of its rows, times `weights`, (T, K).

        The rows of sentinels add nothing: they are zeros, or their weights are.
        """
        placed = widened(rows.index_select(0, self.places)).unflatten(0, self.exists.shape)
        if weights is not None:
            placed = placed * weights.unsqueeze(-1)
        return placed.sum(1).to(rows.dtype)

    def activated(self, h: Tensor) -> Tensor:
        """Return the activation of h, by its op."""
        call = self.call
        name, options = ACTIVATIONS[call.activation]
        activate = self.implementation(library.OPS[name])
        if name == "relu_squared":
            return activate(h)
        if name == "clamped_swiglu":
            return activate(h, None, call.alpha, call.limit, call.up_offset, call.interleaved)
        # The op itself splits halves. Of pairs, gate and up are two views.
        gate, up = (h[:, ::2], h[:, 1::2]) if call.interleaved else (h, None)
        return activate(gate, up, *options)

    def implementation(self, op: Op) -> Callable[..., Tensor]:
        """Return the function that computes an activation."""
        return op.definition

    def slopes(
        self, da: Tensor, h: Tensor, wants_act: bool, wants_dweights: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the gradient of h, a(h) times its weight, and the gradients of the weights.

        da is dy @ down[e], the gradient of a(h) before it is multiplied by the row's weight. The
        last two results are None unless they are wanted.
        """
        wide, weights = widened(h), self.by_expert(self.weights).unsqueeze(1)
        act = self.activated(wide)
        dweights = (widened(da) * act).sum(1) if wants_dweights else None
        (dh,) = vector_jacobian(self.activated, [wide], [0], [widened(da) * weights])
        assert dh is not None
        return dh.to(h.dtype), (act * weights).to(h.dtype) if wants_act else None, dweights

    def up(self) -> Tensor:
        """Return h, the rows before the activation."""
        return self.project("gate_up", self.of_tokens(self.call.x))

    def project(self, name: str, x: Tensor) -> Tensor:
        """Return x times the transposed weight `name`, plus its bias and its LoRA's product."""
        weight, bias, lora_b = self.named(name, "", "_bias", "_lora_b")
        y = self.product_of_rows(x, weight, bias)
        if lora_b is not None:
            y = y + self.product_of_rows(self.low_rank(name, x), lora_b)
        return y

    def project_back(self, name: str, dy: Tensor) -> Tensor:
        """Return dy times the weight `name`, plus the same product with its LoRA."""
        weight, lora_a = self.named(name, "", "_lora_a")
        dx = self.product_of_rows(dy, weight.mT)
        if lora_a is not None:
            dx = dx + self.product_of_rows(self.low_rank_gradient(name, dy), lora_a.mT)
        return dx

    def low_rank(self, name: str, x: Tensor) -> Tensor:
        a, scale = self.named(name, "_lora_a", "_lora_scale")
        return self.product_of_rows(x, a) * scale

    def low_rank_gradient(self, name: str, dy: Tensor) -> Tensor:
        b, scale = self.named(name, "_lora_b", "_lora_scale")
        return self.product_of_rows(dy, b.mT) * scale

    def named(self, name: str, *parts: str) -> list[Any]:
        return [getattr(self.call, name + part) for part in parts]

    def gradient(self, name: str, a: Tensor, b: Tensor) -> Tensor:
        """Return each expert's a.T @ b, in the memory order of the argument `name`."""
        argument = getattr(self.call, name)
        if is_transposed(argument):
            return dense(self.product_over_rows(b, a).mT, argument)
        return dense(self.product_over_rows(a, b), argument)

    def results(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Compute the results of `moe_experts_forward`."""
        h = self.up()
        y = self.combine(self.project("down", self.activated(h)), self.weights)
        return y, self.order, self.offsets, h if self.call.return_pre_activation else None

    def gradients(self) -> tuple[Tensor | None, ...]:
        """Compute the results of `moe_experts_backward`."""
        call, names = self.call, GRADIENTS.split()
        arguments = [getattr(call, name[1:]) for name in names]
        masked = zip(names, arguments, call.output_mask, strict=True)
        wanted = {name for name, argument, needed in masked if needed and argument is not None}
        gradients = self._gradients(wanted, self.of_tokens(call.dy))
        return tuple(gradients.get(name) for name in names)

    def _gradients(self, wanted: set[str], dy: Tensor) -> dict[str, Tensor]:
        """Return the wanted gradients by name, from the rows of dy.

        Rows are freed as soon as they are used, to keep the peak of memory low.
        """
        call, gradients = self.call, {}
        if "ddown_bias" in wanted:
            gradients["ddown_bias"] = self.sums(dy, self.by_expert(self.weights))
        if wanted <= {"ddown_bias"}:
            return gradients
        h = call.pre_activation
        # For a second derivative h is computed again: the saved h is a constant to autograd.
        if h is None or is_differentiated():
            h = self.up()
        da = self.project_back("down", dy)
        of_down = {"ddown", "ddown_lora_a", "ddown_lora_b"} & wanted
        dh, act, dweights = self.slopes(da, h, bool(of_down), "dtop_k_weights" in wanted)
        del da, h
        if dweights is not None:
            gradients["dtop_k_weights"] = self._gradient_of_router(dweights)
        if act is not None:
            gradients |= self._gradients_of_weights(of_down, "down", dy, act)
        del act, dy
        of_up = {"dgate_up", "dgate_up_lora_a", "dgate_up_lora_b"} & wanted
        if of_up:
            gradients |= self._gradients_of_weights(of_up, "gate_up", dh, self.of_tokens(call.x))
        if "dgate_up_bias" in wanted:
            gradients["dgate_up_bias"] = self.sums(dh)
        if "dx" in wanted:
            gradients["dx"] = self.combine(self.project_back("gate_up", dh))
        return gradients

    def _gradient_of_router(self, of_activations: Tensor) -> Tensor:
        """Return the gradient of the router's weights, given its part due to the activations."""
        gradient = of_activations.index_select(0, self.places).view(self.exists.shape)
        if self.call.down_bias is not None:
            gradient = gradient + of_biases(self.call, self.call.dy)
        return gradient.where(self.exists, 0.0).to(self.call.top_k_weights.dtype)

    def _gradients_of_weights(
        self, wanted: set[str], name: str, dy: Tensor, x: Tensor
    ) -> dict[str, Tensor]:
        """Return the gradients of the weight `name` and of its LoRA.

        x are the rows that they are multiplied by, and dy the gradient of the product.
        """
        gradients = {}
        if f"d{name}" in wanted:
            gradients[f"d{name}"] = self.gradient(name, dy, x)
        if f"d{name}_lora_a" in wanted:
            du = self.low_rank_gradient(name, dy)
            gradients[f"d{name}_lora_a"] = self.gradient(f"{name}_lora_a", du, x)
        if f"d{name}_lora_b" in wanted:
            u = self.low_rank(name, x)
            gradients[f"d{name}_lora_b"] = self.gradient(f"{name}_lora_b", dy, u)
        return gradients
