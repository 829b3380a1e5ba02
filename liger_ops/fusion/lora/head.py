"""A head with LoRA adapters of peft, whose loss is computed without the adapted weight."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import tensor_parallel

LAYER = "peft.tuners.lora.layer.Linear"
# The types of a LoRA's factor that an op takes as a number. A tensor may need a gradient.
NUMBERS = (int, float)


class LoraHead:
    """A LoRA Linear of peft, and the linear layer to which it adds its active adapters.

    weight and bias are those of the linear layer, and other attributes those of peft's layer.
    """

    def __init__(self, layer: Any, base: nn.Linear, adapters: list[str]) -> None:
        self.layer = layer
        self.base = base
        self.adapters = adapters

    # Properties, because FSDP2 sets whole tensors in the place of shards while a loss is computed.
    @property
    def weight(self) -> Tensor:
        return self.base.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)

    def __call__(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.layer(hidden)
        return logits

    def lora(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return lora_x and lora_b of `linear_cross_entropy_forward`, all adapters side by side,
        in the adapters' dtypes.
        """
        return _side_by_side([(x, lora_b.weight) for x, lora_b in self._products(hidden)])

    def lora_over_words(self, hidden: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return lora_x and lora_b as DTensors: lora_x with the placement of x, which is the
        layer's input as a DTensor, and lora_b sharded over words."""
        products = self._products(hidden)
        return _side_by_side([tensor_parallel.adapter(lora_b, of, x) for of, lora_b in products])

    def _products(self, hidden: Tensor) -> list[tuple[Tensor, nn.Linear]]:
        """Return the scaled input of each adapter's lora_B, with lora_B.

        The modules of peft's layer are called as it calls them, so that dropout draws the same
        mask.
        """
        layer = self.layer
        x, products = hidden, []
        for name in self.adapters:
            lora_a = layer.lora_A[name]
            x = layer._cast_input_dtype(x, lora_a.weight.dtype)
            lora_x = lora_a(layer.lora_dropout[name](x)) * layer.scaling[name]
            products.append((lora_x, layer.lora_B[name]))
        return products


def _side_by_side(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    if len(pairs) == 1:
        return pairs[0]
    inputs, weights = zip(*pairs, strict=True)
    return torch.cat(inputs, -1), torch.cat(weights, -1)


class Adapters(NamedTuple):
    """The names of a layer's active adapters, and the pair lora_A, lora_B of each."""

    names: list[str]
    layers: list[tuple[nn.Linear, nn.Linear]]


def adapters_of(layer: Any, whose: str = "its head") -> Adapters | str:
    """Return the adapters that peft's LoRA Linear adds in a call, or why the op cannot do so.

    Adapters that are neither merged nor disabled add lora_B(lora_A(dropout(x))) * scaling each. The
    variants of LoRA, such as DoRA, compute something else, and are left to peft.
    """
    what = f"{whose} is a {LAYER}"
    if layer.merged or layer.disable_adapters:
        return f"{what} that is merged and disabled, which its next call unmerges"
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    layers = []
    for name in names:
        if name in getattr(layer, "lora_variant", names):
            return f"{what} whose adapter {name} is not a plain LoRA"
        dropout = layer.lora_dropout[name]
        if type(dropout) not in (nn.Identity, nn.Dropout):
            return f"{what} whose dropout is a {type(dropout).__name__}"
        pair = layer.lora_A[name], layer.lora_B[name]
        for part in pair:
            if type(part) is not nn.Linear:
                return f"{what} whose adapter {name} has a {type(part).__name__}"
            if part.bias is not None:
                return f"{what} whose adapter {name} has a bias"
        layers.append(pair)
    return Adapters(names, layers)
