"""A linear layer with a LoRA, and MLPs that are computed a tile of tokens at a time."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..ops.activations.tiled_mlp import tiled_mlp
from ..ops.lora_linear import lora_linear
from .derived import check_size, documented, named

__all__ = ["LoRALinear", "Tiled", "TiledMLP"]


@documented(lora_linear)
class LoRALinear(nn.Linear):
    """A frozen torch.nn.Linear with a trainable LoRA.

    Args:
        in_features, out_features: the sizes D and N.
        rank: the size R.
        bias: whether the layer has a bias.

    Attributes:
        weight, bias: those of torch.nn.Linear, without gradients.
        a: (R, D), which starts as the weight of torch.nn.Linear.
        b: (N, R), which starts as 0.

    Example:
        >>> layer = liger_ops.nn.LoRALinear(8, 4, rank=2, scale=0.5)
        >>> layer(torch.zeros(2, 3, 8)).shape
        torch.Size([2, 3, 4])
    """

    def __init__(
        self, in_features: int, out_features: int, rank: int, scale: float, bias: bool = True,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(in_features, out_features, bias, device, dtype)
        check_size("LoRALinear", "rank", rank)
        self.requires_grad_(False)
        self.scale = scale
        self.a = nn.Parameter(torch.empty(rank, in_features, device=device, dtype=dtype))
        self.b = nn.Parameter(torch.zeros(out_features, rank, device=device, dtype=dtype))
        nn.init.kaiming_uniform_(self.a, a=5**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return lora_linear(x, self.weight, self.a, self.b, self.scale, self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rank={self.a.shape[0]}, {named(self, 'scale')}"


@documented(tiled_mlp)
class TiledMLP(nn.Module):
    """A gated MLP, as Llama's, computed a tile of tokens at a time.

        y = down_proj(activation(gate_proj(x)) * up_proj(x))

    The weights of the projections are read, but their forwards are not called: their hooks do not
    run, and an adapter in the place of a projection (peft's LoRA) is refused with TypeError.
    `liger_ops.nn.Tiled` takes such an MLP.

    Args:
        hidden_size: the size D of x and y.
        intermediate_size: the size I of gate and up.
        bias: whether the projections have biases.

    Attributes:
        gate_proj, up_proj, down_proj: torch.nn.Linear, with the names of Llama's MLP.

    Example:
        >>> mlp = liger_ops.nn.TiledMLP(8, 16, tile_rows=128)
        >>> mlp(torch.zeros(2, 1000, 8)).shape
        torch.Size([2, 1000, 8])
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, activation: str = "silu",
        bias: bool = False, tile_rows: int | None = None,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.activation = activation
        self.tile_rows = tile_rows
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias, device, dtype)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias, device, dtype)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias, device, dtype)
        # Raises the op's own errors for wrong options now, not at the first forward.
        one = torch.empty(1, 1, device="meta")
        tiled_mlp(one, one, one, one, activation=activation, tile_rows=tile_rows)

    def forward(self, x: Tensor) -> Tensor:
        names = ("gate_proj", "up_proj", "down_proj")
        layers = [getattr(self, name) for name in names]
        for name, layer in zip(names, layers, strict=True):
            if type(layer) is not nn.Linear:
                raise TypeError(
                    f"TiledMLP: {name} must be a torch.nn.Linear, got a {type(layer).__name__};"
                    " liger_ops.nn.Tiled takes any module"
                )
        gate, up, down = layers
        return tiled_mlp(
            x, gate.weight, up.weight, down.weight, gate.bias, up.bias, down.bias,
            self.activation, self.tile_rows,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return named(self, "activation", "tile_rows")


class Tiled(nn.Module):
    """A module that treats each token by itself, computed a tile of tokens at a time.

        y[tokens] = module(x[tokens])

    The backward computes each tile again, by torch.utils.checkpoint. A parameter's gradient is
    summed over the tiles in the parameter's dtype; `liger_ops.nn.TiledMLP` sums it in float32. The
    module compiles without a graph break.

    Args:
        module: maps (M, D) to (M, O), each row by itself.
        num_tiles: the number of tiles, of similar sizes.

    Shape:
        x: (..., D); y: (..., O).

    Raises:
        ValueError: num_tiles is less than 1.

    Example:
        >>> tiled = liger_ops.nn.Tiled(torch.nn.Linear(8, 4), num_tiles=3)
        >>> tiled(torch.zeros(2, 10, 8)).shape
        torch.Size([2, 10, 4])
    """

    def __init__(self, module: nn.Module, num_tiles: int) -> None:
        super().__init__()
        if num_tiles < 1:
            raise ValueError(f"Tiled: num_tiles must be at least 1, got {num_tiles}")
        self.module = module
        self.num_tiles = num_tiles

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        # These sizes compile once for all numbers of tokens; those of tensor_split do not.
        ends = [rows.shape[0] * i // self.num_tiles for i in range(self.num_tiles + 1)]
        tiles = rows.split([end - start for start, end in pairwise(ends)])
        y = torch.cat([checkpoint(self.module, tile, use_reentrant=False) for tile in tiles])
        return y.reshape(*x.shape[:-1], y.shape[-1])

    def extra_repr(self) -> str:
        return f"num_tiles={self.num_tiles}"
