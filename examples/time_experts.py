"""The experts of a layer: `moe_experts`, transformers' `grouped_mm` eager and compiled, and the
products alone, by PyTorch's grouped product.

    python examples/time_experts.py --layers qwen3-30b-32k deepseek-v3
    python examples/time_experts.py --layers qwen3-30b-8k --ways liger liger-kernel

prints TFLOP/s of the forward and of forward and backward, GiB that the forward saves, and the error
of the gradients against `grouped_mm`. Without a GPU it compares alone, of small layers.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.integrations.moe import grouped_mm_experts_forward

import liger_ops
from liger_ops.device import MeasuredDevice

STEPS, WARM_UPS = 15, 4
# Loose, because transformers' code sums the gradients of biases in bfloat16.
ALLOWED = 5e-2


class Layer(NamedTuple):
    tokens: int
    top_k: int
    experts: int
    hidden: int
    intermediate: int
    # Clamped, with biases, transposed weights and pairs of gate and up.
    is_gpt_oss: bool = False
    # The rank of a LoRA of both projections, whose weights are then frozen.
    rank: int = 0


LAYERS = {
    "qwen3-30b-32k": Layer(32768, 8, 128, 2048, 768),
    "qwen3-30b-8k": Layer(8192, 8, 128, 2048, 768),
    "gpt-oss-20b": Layer(8192, 4, 32, 2880, 2880, True),
    "deepseek-v3": Layer(8192, 8, 64, 7168, 2048),
    "qwen3-30b-lora": Layer(4096, 8, 128, 2048, 768, rank=16),
    "tiny": Layer(50, 2, 8, 32, 16),
    "tiny-gpt-oss": Layer(50, 2, 8, 32, 16, True),
    "tiny-lora": Layer(50, 2, 8, 32, 16, rank=4),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--layers", nargs="*", choices=LAYERS)
    parser.add_argument("--ways", nargs="*", default=["liger", "recompute", "eager", "compile"])
    options = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    names = options.layers or [name for name in LAYERS if name.startswith("tiny") != has_gpu]
    wrong = False
    for name in names:
        for skewed in (False, True):
            print(f"{name}, {'skewed' if skewed else 'balanced'}", flush=True)
            for way, error, text in rows(LAYERS[name], skewed, options.ways):
                wrong |= not error <= ALLOWED
                print(f"  {way:10} {text}, error {error:.1e}", flush=True)
    return int(wrong)


def rows(layer: Layer, skewed: bool, ways: list[str]) -> Iterator[tuple[str, float, str]]:
    """Yield for each way its name, the error of its gradients, and its figures."""
    leaves, index, dy = tensors(layer, skewed)
    calls = functions(layer, leaves, index)
    truth = gradients(calls["eager"], leaves, dy)
    for way in ways:
        step = partial(gradients, calls[way], leaves, dy)
        pairs = zip(step(), truth, strict=True)
        error = max(float((a - b).norm() / b.norm().clamp(min=1e-30)) for a, b in pairs)
        text = "compared" if not dy.is_cuda else figures(calls[way], step, layer)
        yield way, error, text
    if dy.is_cuda:
        forward, backward = products(layer, leaves, index)
        yield "products", 0.0, figures(forward, lambda: (forward(), backward()), layer)


def tensors(layer: Layer, skewed: bool) -> tuple[list[Tensor], Tensor, Tensor]:
    """Draw the inputs of a layer, the ids of experts, and the gradient of y. The inputs are x, the
    weights, the router's weights, the biases, and the parameters of LoRAs in peft's layout. If
    skewed, a tenth of the experts gets about half of the ids. No expert is drawn twice for a
    token."""
    T, K, E, D, I, is_gpt_oss, R = layer
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    make = partial(torch.randn, device=device, dtype=torch.bfloat16)
    shapes = ((E, D, 2 * I), (E, I, D)) if is_gpt_oss else ((E, 2 * I, D), (E, D, I))
    weights = [make(shape) * 0.02 for shape in shapes]
    biases = [make(E, 2 * I) * 0.02, make(E, D) * 0.02] if is_gpt_oss else []
    router = torch.randn(T, K, device=device).softmax(-1)
    sizes = ((E * R, D), (2 * I, R * E), (E * R, I), (D, R * E)) if R else ()
    loras = [make(size) * 0.02 for size in sizes]
    leaves = [t.requires_grad_() for t in (make(T, D), *weights, router, *biases, *loras)]
    for weight in weights:
        weight.requires_grad_(not R)
    few = max(1, E // 10)
    share = torch.full((E,), 0.5 / (E - few) if skewed else 1.0, device=device)
    if skewed:
        share[:few] = 0.5 / few
    return leaves, torch.multinomial(share.expand(T, E), K), make(T, D)


def functions(
    layer: Layer, leaves: list[Tensor], index: Tensor
) -> dict[str, Callable[[], Tensor]]:  # fmt: skip
    x, gate_up, down, router, *rest = leaves
    biases, loras = (rest[:2], rest[2:]) if layer.is_gpt_oss else ([], rest)
    views = [w.mT for w in (gate_up, down)] if layer.is_gpt_oss else [gate_up, down]
    activation = "clamped_swiglu" if layer.is_gpt_oss else "silu"
    arguments: list[Any] = [x, *views, index, router, *biases]
    options: Any = {"activation": activation, "interleaved": layer.is_gpt_oss}
    names = ("gate_up_lora_a", "gate_up_lora_b", "down_lora_a", "down_lora_b")

    def ours(recompute: bool = False) -> Tensor:
        lora = dict(zip(names, factors(layer, loras), strict=False))
        return liger_ops.moe_experts(*arguments, **options | lora | {"recompute": recompute})

    parameters = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
    module: Any = SimpleNamespace(
        **dict(zip(parameters, (gate_up, down, *biases), strict=False)),
        num_experts=layer.experts, has_gate=True, has_bias=layer.is_gpt_oss,
        is_transposed=layer.is_gpt_oss, has_post_expert_norm=False, _is_expert_parallel=False,
        _apply_gate=clamped if layer.is_gpt_oss else gated,
    )  # fmt: skip

    def grouped() -> Tensor:
        if layer.rank:
            # As peft's ParamWrapper.
            up_a, up_b, down_a, down_b = factors(layer, loras)
            module.gate_up_proj = torch.baddbmm(gate_up, up_b, up_a)
            module.down_proj = torch.baddbmm(down, down_b, down_a)
        return grouped_mm_experts_forward(module, x, index, router)

    recompute = partial(ours, recompute=True)
    compiled = torch.compile(grouped)
    return {
        "liger": ours, "recompute": recompute, "eager": grouped, "compile": compiled,
        "liger-kernel": partial(liger_kernel, x, gate_up, down, index, router),
    }  # fmt: skip


def liger_kernel(*tensors: Tensor) -> Tensor:
    """Call Liger-Kernel's fused experts, without biases or a LoRA. They tune for minutes first."""
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    x, gate_up, down, index, router = tensors
    return LigerFusedMoEFunction.apply(x, gate_up, down, index.int(), router)


def factors(layer: Layer, loras: list[Tensor]) -> list[Tensor]:
    """Reshape the parameters of LoRAs from peft's layout to a matrix for each expert."""
    E = layer.experts
    return [
        t.unflatten(1, (-1, E)).permute(2, 0, 1).contiguous() if i % 2 else t.unflatten(0, (E, -1))
        for i, t in enumerate(loras)
    ]


def gated(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, -1)
    return F.silu(gate) * up


def clamped(h: Tensor) -> Tensor:
    """Compute the activation of GPT-OSS."""
    gate, up = h[..., ::2].clamp(max=7.0), h[..., 1::2].clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(gate * 1.702)


def products(
    layer: Layer, leaves: list[Tensor], index: Tensor
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return functions of the matrix products of the forward, and of the backward, without the
    gathering of rows."""
    x, gate_up, down = (leaf.detach() for leaf in leaves[:3])
    up, back = (gate_up, down) if layer.is_gpt_oss else (gate_up.mT, down.mT)
    ids = index.flatten().sort().values
    ends = torch.searchsorted(ids, torch.arange(1, layer.experts + 1, device=x.device)).int()
    rows = x.repeat(layer.top_k, 1)
    h = torch.randn_like(rows[:, :1].expand(-1, 2 * layer.intermediate).contiguous())
    a = h[:, : layer.intermediate].contiguous()
    product = partial(F.grouped_mm, offs=ends)
    forward = ((rows, up), (a, back))
    of_inputs = ((rows, back.mT), (h, up.mT))
    backward = of_inputs if layer.rank else (*of_inputs, (h.mT, rows), (rows.mT, a))
    return tuple(  # type: ignore[return-value]
        partial(lambda pairs: [product(*pair) for pair in pairs], pairs)
        for pairs in (forward, backward)
    )


def gradients(call: Callable[[], Tensor], leaves: list[Tensor], dy: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(call(), [leaf for leaf in leaves if leaf.requires_grad], dy)


def figures(call: Callable[[], Any], step: Callable[[], Any], layer: Layer) -> str:
    device = MeasuredDevice("cuda")
    with torch.no_grad():
        forward, _ = device.consecutive(call, STEPS, WARM_UPS)
    full, _ = device.consecutive(step, STEPS, WARM_UPS)
    before = torch.cuda.memory_allocated()
    y = call()
    taken = torch.cuda.memory_allocated() - before
    saved = (taken - y.nbytes) / 2**30 if isinstance(y, Tensor) else 0.0
    operations = 6 * layer.tokens * layer.top_k * layer.hidden * layer.intermediate
    # A frozen weight has no product of its gradient.
    times_full = 2 if layer.rank else 3
    rates = [n * operations / ms.p50 / 1e9 for n, ms in ((1, forward), (times_full, full))]
    times = f"{forward.p50:.2f} ms {rates[0]:.0f}, {full.p50:.2f} ms {rates[1]:.0f} TFLOP/s"
    return f"{times}, saved {saved:.3f} GiB"


if __name__ == "__main__":
    raise SystemExit(main())
