"""The rows of a mixture's experts, their products, and the gradients that follow from these: for
the definition, and for a device with grouped products of its own."""

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
from ..eager import is_eager
from ..precision import widened
from ..strides import dense, is_transposed

# Activation -> the op that computes it, and that op's options. Those of clamped_swiglu are given.
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
    """`order` and `offsets`, as `moe_experts_forward` returns them. The ids are sorted as numbers
    of dtype."""
    ids = top_k_index.flatten()
    ids = ids.where((ids >= 0) & (ids < E), E).to(dtype)
    ids, order = ids.sort(stable=True)
    ends = torch.arange(E + 1, dtype=dtype, device=ids.device)
    return order.int(), torch.searchsorted(ids, ends).int()


def of_biases(call: Any, dy: Tensor) -> Tensor:
    """The part of the gradient of the router's weights, (T, K), that comes from down_bias."""
    bias, ids = call.down_bias.t(), call.top_k_index.long()
    if dy.is_cuda and dy.dtype is torch.bfloat16:
        products = torch.ops.aten.mm.dtype(dy, bias, torch.float32)
    else:
        products = widened(dy) @ widened(bias)
    exists = (ids >= 0) & (ids < bias.shape[1])
    return products.gather(1, ids.where(exists, 0)).where(exists, 0.0)


class ExpertRows:
    """The rows of tokens of a call's experts: those of an expert are together, and those of
    sentinels are last. The products here are a loop over experts."""

    def __init__(self, call: Any, order: Tensor, offsets: Tensor) -> None:
        self.call, self.order, self.offsets = call, order, offsets
        ids, self.E = call.top_k_index, call.down.shape[0]
        self.tokens = order // max(1, ids.shape[1])
        # A row's place in the order, by token.
        numbers = torch.arange(order.numel(), dtype=torch.int32, device=order.device)
        self.places = torch.empty_like(numbers).scatter(0, order.long(), numbers)
        # A sentinel's weight may be anything.
        self.exists = (ids >= 0) & (ids < self.E)
        self.weights = widened(call.top_k_weights).where(self.exists, 0.0).contiguous()

    @cached_property
    def sizes(self) -> list[int]:
        """The numbers of rows of each expert, and of sentinels, read from the device."""
        n = self.order.numel()
        if self.order.is_meta:
            # Any sizes have the same number of operations.
            return [n, *[0] * self.E]
        return [end - start for start, end in pairwise([*self.offsets.tolist(), n])]

    def of_tokens(self, x: Tensor) -> Tensor:
        """The rows of tokens, by expert."""
        return x.index_select(0, self.tokens)

    def by_expert(self, values: Tensor) -> Tensor:
        """Numbers (T, K), in the order of the experts' rows."""
        return values.flatten().index_select(0, self.order)

    def product_of_rows(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x @ weight[e].T + bias[e] for the rows of each expert: (n, K), (E, N, K), (E, N) ->
        (n, N). The rows of sentinels may be anything, and are zeros here."""
        # The gradient of unbind is one stack; that of an index would be a tensor of all experts.
        biases = [None] * self.E if bias is None else bias.unbind()
        parts = zip(x.split(self.sizes), weight.unbind(), biases, strict=False)
        if is_eager(x, weight):
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
        """a.T @ b of the rows of each expert: (n, P), (n, Q) -> (E, P, Q)."""
        parts = zip(a.split(self.sizes)[:-1], b.split(self.sizes), strict=False)
        if is_eager(a, b):
            y = a.new_empty(self.E, a.shape[1], b.shape[1])
            for out, (left, right) in zip(y, parts, strict=True):
                torch.mm(left.t(), right, out=out)
            return y
        return torch.stack([left.t() @ right for left, right in parts])

    def sums(self, rows: Tensor, weights: Tensor | None = None) -> Tensor:
        """Each expert's sum of rows, times numbers by expert."""
        wide = widened(rows) if weights is None else widened(rows) * weights.unsqueeze(1)
        return torch.stack([part.sum(0) for part in wide.split(self.sizes)[:-1]]).to(rows.dtype)

    def combine(self, rows: Tensor, weights: Tensor | None = None) -> Tensor:
        """Each token's sum of rows, times the weights, without the rows of sentinels."""
        placed = widened(rows.index_select(0, self.places)).unflatten(0, self.exists.shape)
        if weights is not None:
            placed = placed * weights.unsqueeze(-1)
        return placed.sum(1).to(rows.dtype)

    def activated(self, h: Tensor) -> Tensor:
        """The activation of h, by its op."""
        call = self.call
        name, options = ACTIVATIONS[call.activation]
        activate = self.implementation(library.OPS[name])
        if name == "relu_squared":
            return activate(h)
        if name == "clamped_swiglu":
            return activate(h, None, call.alpha, call.limit, call.up_offset, call.interleaved)
        # The op splits halves, and a pair's gate and up are two views.
        gate, up = (h[:, ::2], h[:, 1::2]) if call.interleaved else (h, None)
        return activate(gate, up, *options)

    def implementation(self, op: Op) -> Callable[..., Tensor]:
        """What computes an activation."""
        return op.definition

    def slopes(
        self, da: Tensor, h: Tensor, wants_act: bool, wants_dweights: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """With da, the gradients of the activations a without their weights: the gradient of h, a
        times its weight, and the gradients of the weights."""
        wide, weights = widened(h), self.by_expert(self.weights).unsqueeze(1)
        act = self.activated(wide)
        dweights = (widened(da) * act).sum(1) if wants_dweights else None
        (dh,) = vector_jacobian(self.activated, [wide], [0], [widened(da) * weights])
        assert dh is not None
        return dh.to(h.dtype), (act * weights).to(h.dtype) if wants_act else None, dweights

    def up(self) -> Tensor:
        """h, the rows before the activation."""
        return self.project("gate_up", self.of_tokens(self.call.x))

    def project(self, name: str, x: Tensor) -> Tensor:
        """x times the transposed weight of this name, with its bias and its LoRA."""
        weight, bias, lora_b = self.named(name, "", "_bias", "_lora_b")
        y = self.product_of_rows(x, weight, bias)
        if lora_b is not None:
            y = y + self.product_of_rows(self.low_rank(name, x), lora_b)
        return y

    def project_back(self, name: str, dy: Tensor) -> Tensor:
        """dy times the weight of this name, and its LoRA."""
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
        """Each expert's a.T @ b, in the order of the strides of the argument of this name."""
        argument = getattr(self.call, name)
        if is_transposed(argument):
            return dense(self.product_over_rows(b, a).mT, argument)
        return dense(self.product_over_rows(a, b), argument)

    def results(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """The results of `moe_experts_forward`."""
        h = self.up()
        y = self.combine(self.project("down", self.activated(h)), self.weights)
        return y, self.order, self.offsets, h if self.call.return_pre_activation else None

    def gradients(self) -> tuple[Tensor | None, ...]:
        """The results of `moe_experts_backward`."""
        call, names = self.call, GRADIENTS.split()
        arguments = [getattr(call, name[1:]) for name in names]
        masked = zip(names, arguments, call.output_mask, strict=True)
        wanted = {name for name, argument, needed in masked if needed and argument is not None}
        found = self._gradients(wanted, self.of_tokens(call.dy))
        return tuple(found.get(name) for name in names)

    def _gradients(self, wanted: set[str], dy: Tensor) -> dict[str, Tensor]:
        """The wanted gradients by name, from the rows of dy, which are freed on the way."""
        call, found = self.call, {}
        if "ddown_bias" in wanted:
            found["ddown_bias"] = self.sums(dy, self.by_expert(self.weights))
        if wanted <= {"ddown_bias"}:
            return found
        h = call.pre_activation
        if h is None or is_differentiated():
            h = self.up()
        da = self.project_back("down", dy)
        of_down = {"ddown", "ddown_lora_a", "ddown_lora_b"} & wanted
        dh, act, dweights = self.slopes(da, h, bool(of_down), "dtop_k_weights" in wanted)
        del da, h
        if dweights is not None:
            found["dtop_k_weights"] = self._gradient_of_router(dweights)
        if act is not None:
            found |= self._gradients_of_weights(of_down, "down", dy, act)
        del act, dy
        of_up = {"dgate_up", "dgate_up_lora_a", "dgate_up_lora_b"} & wanted
        if of_up:
            found |= self._gradients_of_weights(of_up, "gate_up", dh, self.of_tokens(call.x))
        if "dgate_up_bias" in wanted:
            found["dgate_up_bias"] = self.sums(dh)
        if "dx" in wanted:
            found["dx"] = self.combine(self.project_back("gate_up", dh))
        return found

    def _gradient_of_router(self, of_activations: Tensor) -> Tensor:
        """The gradient of the router's weights, from its part that comes from activations."""
        gradient = of_activations.index_select(0, self.places).view(self.exists.shape)
        if self.call.down_bias is not None:
            gradient = gradient + of_biases(self.call, self.call.dy)
        return gradient.where(self.exists, 0.0).to(self.call.top_k_weights.dtype)

    def _gradients_of_weights(
        self, wanted: set[str], name: str, dy: Tensor, x: Tensor
    ) -> dict[str, Tensor]:
        """The gradients of the weight of this name and of its LoRA, from the product's rows x and
        the gradient of its result."""
        found = {}
        if f"d{name}" in wanted:
            found[f"d{name}"] = self.gradient(name, dy, x)
        if f"d{name}_lora_a" in wanted:
            du = self.low_rank_gradient(name, dy)
            found[f"d{name}_lora_a"] = self.gradient(f"{name}_lora_a", du, x)
        if f"d{name}_lora_b" in wanted:
            u = self.low_rank(name, x)
            found[f"d{name}_lora_b"] = self.gradient(f"{name}_lora_b", dy, u)
        return found
