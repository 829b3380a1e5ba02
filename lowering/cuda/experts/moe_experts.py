"""moe_experts: `route` sorts the rows of tokens by expert, and `products` multiplies them.

T tokens, E experts; n rows, one for each expert of a token; D and I columns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .... import library
from ....ops.experts.rows import of_biases
from ....ops.tensors import is_transposed
from ...common.experts.moe_experts import activation_of
from ...common.tensors import cdiv, next_power_of_2
from ..launch import (
    compute_capability,
    input_precision,
    launch,
    on_nvidia,
    pipeline_stages,
    processors,
    rows,
)
from .products import (
    _bias_kernel,
    _combine_kernel,
    _rows_kernel,
    _slopes_kernel,
    _up_kernel,
    _weight_kernel,
)
from .route import RowBlocks, blocks_of, sort


@dataclass(frozen=True)
class ExpertTiles:
    """The tiles of a product. A persistent kernel has `programs` programs for each multiprocessor;
    with 0, each tile has a program. Tiles of a `group` of blocks of rows are computed one after the
    other, and share the columns of an expert in the L2 cache."""

    BLOCK_M: int = 128
    BLOCK_N: int = 256
    BLOCK_K: int = 64
    num_warps: int = 8
    num_stages: int = 3
    programs: int = 0
    group: int = 8

    def within(self, N: int, K: int) -> ExpertTiles:
        """Shrink the tile to N columns and sums of length K, but not below the 16 of a product."""
        sizes = (min(self.BLOCK_N, next_power_of_2(N)), min(self.BLOCK_K, next_power_of_2(K)))
        return replace(self, BLOCK_N=max(16, sizes[0]), BLOCK_K=max(16, sizes[1]))

    def stages(self, x: Tensor) -> int:
        """Return num_stages, or as many stages as fit in shared memory with tiles of x's dtype."""
        columns = (self.BLOCK_M + self.BLOCK_N) * self.BLOCK_K
        return pipeline_stages(x, columns * x.element_size(), self.num_stages)


# TFLOP/s on an H100 of the products of 32768 tokens of Qwen3-30B-A3B: up 565, with its activation;
# down 523, or 503 without persistent programs; da 609; dx 635, or 597 in groups of 8. Groups of 16
# cost up 6%. Tiles of 128 x 128 and 256 x 128 have 380 to 450, and 4 stages 5% less than 3.
KINDS = {
    "up": ExpertTiles(),
    "down": ExpertTiles(programs=1),
    "da": ExpertTiles(programs=1),
    "dx": ExpertTiles(group=16),
    "lora": ExpertTiles(BLOCK_N=64, BLOCK_K=128, num_warps=4, num_stages=3),
    # The weights' gradients have 440 and 453 where the tile has 128 columns of the tensor whose
    # rows are gathered, and 347 and 336 the other way. An index is loaded two stages ahead of its
    # row.
    "weights": ExpertTiles(num_stages=5),
    "lora_weights": ExpertTiles(BLOCK_N=128, num_warps=4),
}
# Tiles for float32, whose products have its precision and no tensor cores, and for rows that do not
# start at multiples of 16 bytes: larger tiles spill registers.
SMALL = ExpertTiles(64, 64, 16, 4, 2)


class _LoraTerm(NamedTuple):
    """A term that is added to a product of rows: rows u, sorted by expert, times b[e].T, where b is
    (E, N, R)."""

    u: Tensor | None = None
    b: Tensor | None = None

    def numbers(self) -> tuple[int, ...]:
        """Return the strides of b, and R, for a kernel."""
        return (0, 0, 0, 1) if self.b is None else (*self.b.stride(), self.b.shape[2])


NO_LORA = _LoraTerm()


class _ExpertLaunches:
    """The tensors and scalars of a call that its kernels take, and the launches of the kernels.

    There are two orders of the n rows: *by expert*, in the order of `order`, so that the rows of an
    expert are adjacent; and *by token*, in which row t * top_k + k is the k-th expert of token t.
    *Rows of tokens* are rows of x or dy: all experts of a token read the same row.
    """

    def __init__(self, call: Any, order: Tensor, offsets: Tensor) -> None:
        self.call, self.order, self.offsets = call, order, offsets
        self.n, self.top_k = order.numel(), call.top_k_index.shape[1]
        self.E, self.D, self.I = call.down.shape
        self.ids, self.weights = call.top_k_index.contiguous(), call.top_k_weights.contiguous()
        self.activation, self.scalars = activation_of(call)
        self.precision = input_precision(call.x)
        aligned = self.D % 8 == self.I % 8 == 0
        self.small = not aligned or call.x.element_size() == 4
        # PyTorch's grouped product takes bfloat16, on Hopper GPUs, with rows of multiples of 16
        # bytes.
        is_hopper = on_nvidia(call.x) and compute_capability(call.x) == 9
        self.has_grouped_products = aligned and is_hopper and call.x.dtype is torch.bfloat16
        self.blocks: dict[int, RowBlocks] = {}

    def tiles(self, kind: str, N: int, K: int) -> ExpertTiles:
        """Return the tiles of a product with N columns and sums of length K."""
        return (SMALL if self.small else KINDS[kind]).within(N, K)

    def empty(self, columns: int) -> Tensor:
        """Allocate a row for each expert of each token."""
        return self.call.x.new_empty(self.n, columns)

    def launch(
        self, kernel: Any, tiles: ExpertTiles, width: int, N: int, K: int, even: int,
        tensors: tuple[Tensor | None, ...], outputs: tuple[Tensor | None, ...],
        numbers: tuple[Any, ...], lora: _LoraTerm = NO_LORA, **constants: Any,
    ) -> None:  # fmt: skip
        """Launch a product of blocks of rows, with N columns, of which a tile has `width`.

        Sums have length K; no tile needs a mask of columns if N is a multiple of `even`.
        """
        BLOCK_M = tiles.BLOCK_M
        if BLOCK_M not in self.blocks:
            self.blocks[BLOCK_M] = blocks_of(self.offsets, self.n, BLOCK_M)
        table, most = self.blocks[BLOCK_M]
        programs = most * cdiv(N, width)
        if tiles.programs:
            programs = min(programs, tiles.programs * processors(table))
        *strides, R = lora.numbers()
        BLOCK_R = max(16, min(64, next_power_of_2(R)))
        launch(
            kernel, (programs,), table,
            *tensors, *lora, self.order, self.offsets, table, *outputs,
            most, *strides, R, *numbers,
            **constants, EVEN_N=N % even == 0, EVEN_K=K % tiles.BLOCK_K == 0,
            EVEN_R=R % BLOCK_R == 0, PRECISION=self.precision, GROUP=tiles.group,
            BLOCK_M=BLOCK_M, BLOCK_N=tiles.BLOCK_N, BLOCK_K=tiles.BLOCK_K, BLOCK_R=BLOCK_R,
            num_warps=tiles.num_warps, num_stages=tiles.stages(self.call.x),
        )  # fmt: skip

    def up(self, pre: Tensor | None, act: Tensor | None) -> None:
        """Fill pre, h before the activation, and act, its activation; either may be None."""
        call, x = self.call, rows(self.call.x)
        halves = 1 if self.activation == "relu_squared" else 2
        tiles = self.tiles("up", halves * self.I, self.D)
        width = tiles.BLOCK_N // halves
        stride_e, stride_n, stride_k = call.gate_up.stride()
        # As pairs of columns, gate and up of an element are in one thread. As halves of the tile,
        # adjacent columns of the weight are loaded together, which pays if they are adjacent in
        # memory.
        paired = call.interleaved or stride_n != 1
        self.launch(
            _up_kernel, tiles, width, self.I, self.D, width,
            (x, call.gate_up, _contiguous(call.gate_up_bias)), (pre, act),
            (self.D, self.I, self.top_k, x.stride(0), stride_e, stride_n, stride_k, *self.scalars),
            _LoraTerm(self.of_up(), call.gate_up_lora_b),
            ACTIVATION=self.activation, INTERLEAVED=call.interleaved, PAIRED=paired,
        )  # fmt: skip

    def rows(
        self, kind: str, x: Tensor, weight: Tensor, bias: Tensor | None = None,
        lora: _LoraTerm = NO_LORA, scale: float | None = None, of_tokens: bool = False,
    ) -> Tensor:  # fmt: skip
        """Return x @ weight[e].T + bias[e], plus a LoRA.

        With `of_tokens`, x has the rows of tokens, and the result is by expert; else x is by
        expert, and the result by token. A product with a `scale`, the first of a LoRA, is always by
        expert.
        """
        N, K = weight.shape[1:]
        tiles, y = self.tiles(kind, N, K), self.empty(N)
        self.launch(
            _rows_kernel, tiles, tiles.BLOCK_N, N, K, tiles.BLOCK_N,
            (x, weight, _contiguous(bias)), (y,), (K, N, self.top_k, *weight.stride(), scale), lora,
            GATHERS=of_tokens, SCATTERS=not of_tokens and scale is None,
        )  # fmt: skip
        return y

    def low_rank(
        self, x: Tensor, weight: Tensor | None, scale: float, of_tokens: bool = False
    ) -> Tensor | None:
        """Return scale * x @ weight[e].T by expert, where x has the rows of tokens (`of_tokens`) or
        is by expert; None without a weight."""
        if weight is None:
            return None
        return self.rows("lora", x, weight, scale=scale, of_tokens=of_tokens)

    def of_up(self) -> Tensor | None:
        """Return the tokens' products with gate_up_lora_a, by expert; None without a LoRA."""
        call = self.call
        scale = call.gate_up_lora_scale
        return self.low_rank(rows(call.x).contiguous(), call.gate_up_lora_a, scale, of_tokens=True)

    def slopes(
        self, da: Tensor, pre: Tensor, dpre: Tensor, act: Tensor | None, dweights: Tensor | None
    ) -> None:
        """Fill dpre, act, and dweights: the gradient of the router's weights, without the term of
        down_bias."""
        BLOCK_N = min(1024, next_power_of_2(self.I))
        launch(
            _slopes_kernel, (self.n,), da,
            da, pre, self.weights, self.order, self.offsets, dpre, act, dweights,
            self.E, self.I, *self.scalars,
            ACTIVATION=self.activation, INTERLEAVED=self.call.interleaved, BLOCK_N=BLOCK_N,
            num_warps=4,
        )  # fmt: skip

    def weight(
        self, kind: str, dweight: Tensor, a: Tensor, b: Tensor, gathers_a: bool, gathers_b: bool
    ) -> None:
        """Fill dweight with each expert's a.T @ b. `gathers_a`, `gathers_b`: a or b has the rows of
        tokens, which are gathered; the other is by expert."""
        # The memory of a transposed dweight is that of b.T @ a.
        if is_transposed(dweight):
            a, b, gathers_a, gathers_b = b, a, gathers_b, gathers_a
        P, Q = a.shape[1], b.shape[1]
        tiles = SMALL if self.small else KINDS[kind]
        most = (tiles.BLOCK_M, tiles.BLOCK_N) if gathers_a else (tiles.BLOCK_N, tiles.BLOCK_M)
        BLOCK_P, BLOCK_Q = (
            max(16, min(block, next_power_of_2(size)))
            for block, size in zip(most, (P, Q), strict=True)
        )
        launch(
            _weight_kernel, (self.E * cdiv(P, BLOCK_P) * cdiv(Q, BLOCK_Q),), a,
            a, b, self.order, self.offsets, dweight,
            P, Q, self.top_k,
            GATHER_A=gathers_a, GATHER_B=gathers_b, EVEN=P % BLOCK_P == 0 and Q % BLOCK_Q == 0,
            PRECISION=self.precision, GROUP=tiles.group,
            BLOCK_P=BLOCK_P, BLOCK_Q=BLOCK_Q, BLOCK_K=tiles.BLOCK_K,
            num_warps=tiles.num_warps, num_stages=tiles.stages(a),
        )  # fmt: skip

    def weights_gradient(
        self, outputs: list[Tensor | None], i: int, a: Tensor, b: Tensor, gathers_a: bool
    ) -> None:
        """Set outputs[i], unless it is None, to each expert's a.T @ b. With `gathers_a`, a has the
        rows of tokens, else b has."""
        output = outputs[i]
        if output is None:
            return
        if not self.has_grouped_products:
            self.weight("weights", output, a, b, gathers_a, not gathers_a)
            return
        transposed = is_transposed(output)
        # The product allocates its result: the allocated output is freed before.
        output = outputs[i] = None
        tokens = self.order // self.top_k
        a, b = (a[tokens], b) if gathers_a else (a, b[tokens])
        left, right = (b, a) if transposed else (a, b)
        product = F.grouped_mm(left.mT, right, offs=self.offsets[1:])
        outputs[i] = product.mT if transposed else product

    def lora_of_gradient(self, name: str, dy: Tensor, of_tokens: bool) -> _LoraTerm:
        """Return the term that the LoRA of gate_up or down adds to the gradient of its input."""
        a, b, scale = (getattr(self.call, f"{name}_lora_{part}") for part in ("a", "b", "scale"))
        if a is None or b is None:
            return NO_LORA
        return _LoraTerm(self.low_rank(dy, b.mT, scale, of_tokens), a.mT)

    def lora_gradients(
        self, outputs: list[Tensor | None], name: str, dy: Tensor, x: Tensor, du: Tensor | None,
        of_tokens: bool,
    ) -> None:  # fmt: skip
        """Fill the gradients of a LoRA's a and b.

        `of_tokens` is True for down, whose dy has the rows of tokens, and False for gate_up, whose
        x has them. du is scale * dy @ b[e].
        """
        da, db = outputs
        if da is not None and du is not None:
            self.weight("lora_weights", da, du, x, False, not of_tokens)
        if db is not None:
            a, scale = (getattr(self.call, f"{name}_lora_{part}") for part in ("a", "scale"))
            u = self.low_rank(x, a, scale, not of_tokens)
            assert u is not None
            self.weight("lora_weights", db, dy, u, of_tokens, False)

    def bias(self, dbias: Tensor, values: Tensor, weights: Tensor | None) -> None:
        """Fill dbias with each expert's sum of values: rows by expert or, with `weights`, rows of
        tokens times the router's weights."""
        N = dbias.shape[1]
        # 8 warps take 1.5 to 2.3 times as long: 153 instead of 102 us of GPT-OSS's gate_up_bias on
        # an H200, 32768 rows of 32 experts.
        launch(
            _bias_kernel, (self.E, cdiv(N, 64)), values,
            values, weights, self.order, self.offsets, dbias,
            N, self.top_k,
            BLOCK_M=128, BLOCK_N=64, num_warps=2,
        )  # fmt: skip

    def combine(self, values: Tensor, weights: Tensor | None, y: Tensor) -> None:
        """Fill y with each token's sum of its rows of `values`, which are by token, times the
        router's weights if there are `weights`."""
        T, N = y.shape
        BLOCK_N = min(2048, next_power_of_2(N))
        launch(
            _combine_kernel, (T, cdiv(N, BLOCK_N)), y,
            values, self.ids, weights, y,
            N, self.E,
            TOP_K=self.top_k, BLOCK_N=BLOCK_N, num_warps=4,
        )  # fmt: skip


def _contiguous(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.contiguous()


@library.kernel("moe_experts_forward", "cuda")
def moe_experts_forward(
    call: Any, y: Tensor, order: Tensor, offsets: Tensor, pre_activation: Tensor | None, plan: None
) -> None:
    if order.numel() == 0:
        y.zero_()
        offsets.zero_()
        return
    sort(call.top_k_index, order, offsets)
    experts = _ExpertLaunches(call, order, offsets)
    act = experts.empty(experts.I)
    experts.up(pre_activation, act)
    lora = _LoraTerm(
        experts.low_rank(act, call.down_lora_a, call.down_lora_scale), call.down_lora_b
    )
    values = experts.rows("down", act, call.down, call.down_bias, lora)
    experts.combine(values, experts.weights, y)


# allocates=True, because PyTorch's product allocates a weight's gradient.
@library.kernel("moe_experts_backward", "cuda", allocates=True)
def moe_experts_backward(call: Any) -> tuple[Tensor | None, ...]:
    outputs = list(library.allocate("moe_experts_backward", call))
    dx, _, ddown, dtop_k_weights, dgate_up_bias, ddown_bias, *dloras = outputs
    experts = _ExpertLaunches(call, call.order, call.offsets)
    if experts.n == 0:
        return tuple(None if output is None else output.zero_() for output in outputs)
    dy, x, pre = rows(call.dy).contiguous(), rows(call.x).contiguous(), call.pre_activation
    if ddown_bias is not None:
        experts.bias(ddown_bias, dy, experts.weights)
    if all(output is None for output in (*outputs[:5], *dloras)):
        return tuple(outputs)
    if pre is None:
        pre = experts.empty(call.gate_up.shape[1])
        experts.up(pre, None)
    dpre = experts.empty(pre.shape[1])
    wants_act = any(output is not None for output in (ddown, *dloras[2:]))
    act = experts.empty(experts.I) if wants_act else None
    dweights = None
    if dtop_k_weights is not None:
        dweights = dy.new_empty(dtop_k_weights.shape, dtype=torch.float32)
    lora = experts.lora_of_gradient("down", dy, True)
    da = experts.rows("da", dy, call.down.mT, lora=lora, of_tokens=True)
    experts.slopes(da, pre.contiguous(), dpre, act, dweights)
    del da
    if dtop_k_weights is not None and dweights is not None:
        if call.down_bias is not None:
            dweights += of_biases(call, dy)
        dtop_k_weights.copy_(dweights)
    if act is not None:
        experts.lora_gradients(dloras[2:], "down", dy, act, lora.u, True)
        experts.weights_gradient(outputs, 2, dy, act, True)
    del act
    lora = experts.lora_of_gradient("gate_up", dpre, False)
    experts.lora_gradients(dloras[:2], "gate_up", dpre, x, lora.u, False)
    experts.weights_gradient(outputs, 1, dpre, x, False)
    if dgate_up_bias is not None:
        experts.bias(dgate_up_bias, dpre, None)
    if dx is not None:
        experts.combine(experts.rows("dx", dpre, call.gate_up.mT, lora=lora), None, dx)
    return tuple(outputs)
