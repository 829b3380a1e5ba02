"""Time a layer of Llama under tensor and sequence parallelism, beside PyTorch's own layers.

    torchrun --standalone --nproc-per-node 2 examples/time_tensor_parallel.py

Every way computes a layer of Llama 8B in bfloat16, forward and backward. Its gradients are first
compared with one float32 computation of the whole layer: the exit status is 1 if they differ by
more than those of PyTorch's layers. The first rank prints the median on the slower rank and the
most memory that a rank allocated. Without GPUs the ranks are CPU processes (gloo), the layer is
small, and nothing is compiled or timed.

Needs transformers beside liger_ops. docs/distributed.md has figures.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

import liger_ops
from liger_ops.bench.steps.models import TEXT, config_of
from liger_ops.device import MIB, MeasuredDevice
from torchrun_ranks import largest, ranks, relative, say

WAYS: dict[str, tuple[bool, str | None]] = {
    "eager": (False, None),
    "inductor": (False, "inductor"),
    "liger": (False, "liger"),
    "fuse": (True, None),
    "fuse, liger": (True, "liger"),
}
Gradients = dict[str, Tensor]


def main() -> int:
    on_gpu = torch.cuda.is_available()
    with ranks() as mesh:
        layer, x, dy, tables = prepare("llama-8b-8-layers" if on_gpu else "tiny", mesh.device_type)
        truth = gradients(layer, x, dy, tables)
        allowed: dict[str, float] = {}
        failed = False
        for way, (fused, backend) in WAYS.items():
            torch.compiler.reset()
            step = sharded_step(layer, x, dy, tables, mesh, fused, backend if on_gpu else None)
            errors = {name: relative(grad, truth[name]) for name, grad in step().items()}
            # The first way, PyTorch's layers, sets the bound: the others round in other places.
            allowed = allowed or {name: 2 * error + 2**-8 for name, error in errors.items()}
            wrong = [name for name, error in errors.items() if error > allowed[name]]
            failed |= bool(wrong)
            note = f"worst error {max(errors.values()):.1e}"
            note += f", wrong: {wrong}" if wrong else ""
            if on_gpu:
                times, peak = MeasuredDevice("cuda").consecutive(partial(step, False), 15, 5)
                note += "; {:.2f} ms, {:.0f} MiB".format(*largest(times.p50, peak / MIB))
            say(f"{way:12} {note}")
    return int(failed)


def prepare(shape: str, device: str) -> tuple[nn.Module, Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Return the same layer, input, gradient and rotary tables on every rank."""
    config, tokens = config_of(shape, attn_implementation="sdpa"), TEXT[shape][3][1]
    torch.manual_seed(0)
    with torch.device(device):
        layer = LlamaDecoderLayer(config, 0).bfloat16()
        x, dy = (torch.randn(1, tokens, config.hidden_size).bfloat16() for _ in range(2))
        tables = LlamaRotaryEmbedding(config)(x, torch.arange(tokens)[None])
    return layer, x, dy, tables


def output(layer: nn.Module, x: Tensor, tables: tuple[Tensor, ...]) -> Tensor:
    y = layer(x, position_embeddings=tables, attention_mask=None)
    return y[0] if isinstance(y, tuple) else y


def gradients(layer: nn.Module, x: Tensor, dy: Tensor, tables: tuple[Tensor, ...]) -> Gradients:
    """Compute the gradients of the whole layer in float32, on one device."""
    wide, wide_x = copy.deepcopy(layer).float(), x.float().requires_grad_()
    output(wide, wide_x, tuple(table.float() for table in tables)).backward(dy.float())
    return collected(wide, wide_x)


def collected(layer: nn.Module, x: Tensor) -> Gradients:
    """Return the whole gradients of x and of the layer's parameters."""
    grads = {"x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}}
    return {name: whole(grad) for name, grad in grads.items() if grad is not None}


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded_step(
    layer: nn.Module, x: Tensor, dy: Tensor, tables: tuple[Tensor, ...], mesh: DeviceMesh,
    fused: bool, backend: str | None,
) -> Callable[..., Gradients]:  # fmt: skip
    # `fuse` replaces the modules within the module that it gets, and not that module itself.
    holder = nn.Sequential(copy.deepcopy(layer))
    if fused:
        liger_ops.fuse(holder)
    sharded = parallelize_module(holder[0], mesh, plan())
    if backend is not None:
        sharded.compile(backend=backend)
    local_x, local_dy = (rows(tensor, mesh) for tensor in (x, dy))
    local_x.requires_grad_()

    def step(collect: bool = True) -> Gradients:
        sharded.zero_grad()
        local_x.grad = None
        output(sharded, local_x, tables).backward(local_dy)
        return collected(sharded, local_x) if collect else {}

    return step


def plan() -> dict[str, Any]:
    rows: dict[str, Any] = {"output_layouts": Shard(1), "use_local_output": False}
    return {
        "input_layernorm": SequenceParallel(),
        "post_attention_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        ),
        "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(**rows),
        "mlp.down_proj": RowwiseParallel(**rows),
    }


def rows(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Shard a tensor over its tokens."""
    local = x.chunk(mesh.size(), 1)[mesh.get_local_rank()].contiguous()
    return DTensor.from_local(local, mesh, [Shard(1)], run_check=False).detach()


if __name__ == "__main__":
    raise SystemExit(main())
