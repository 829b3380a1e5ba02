"""Train a Llama with random weights on several devices, and time its steps.

    torchrun --nproc-per-node 2 examples/train_distributed.py [--help]

The model is sharded by FSDP2, layer by layer, with float32 weights and a policy of bfloat16, or
replicated by DDP with float32 weights under autocast. Every rank has its own rows. With --tp N,
N ranks have the same rows, and parts of each product, of the tokens between the products, and of
the vocabulary; FSDP2 shards these over the other ranks. A step is forward, backward and AdamW.
Each way trains a model of its own from the same weights:

    eager           the model as it is
    fuse            after liger_ops.fuse(), eager
    compile         each layer by torch.compile, or the whole model with --whole
    liger           liger_ops.fuse() of loss and attention, and each layer by
                    torch.compile(backend="liger"), or the whole model with --whole
    backend         the same without liger_ops.fuse()
    liger-kernel    patched by Liger-Kernel, eager; it patches the process, so it has to be the last

The first rank prints a line for each way: the losses of the first steps, averaged over the ranks,
and on GPUs the median step with the 20th and 80th percentile and the most memory that a rank
allocated. The exit status is 1 if the losses of a way differ from those of the first. Without GPUs
the ranks are CPU processes (gloo), and nothing is timed.

Needs transformers beside liger_ops. docs/distributed.md says which way to take.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import liger_ops
from liger_ops.bench.steps.models import BATCHES, config_of, text_batch
from liger_ops.device import MeasuredDevice
from torchrun_ranks import largest, ranks, say

# The small model's vocabulary is not divisible by the ranks, so that their shards differ in size.
SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b-8-layers": {},
    "llama-3.2-1b": {},
    "tiny": {"vocab_size": 257},
}
WAYS = ("eager", "fuse", "compile", "liger", "backend", "liger-kernel")
COMPARED = 4
# The largest difference of a loss that passes, as the ways round in different places.
BOUNDS = {"bf16": 2e-2, "float32": 1e-4}

Loss = Callable[[dict[str, Tensor]], Tensor]


def main() -> int:
    options = parse_arguments()
    with ranks() as mesh:
        if options.tp < 1 or mesh.size() % options.tp:
            raise SystemExit(f"--tp {options.tp} does not divide the {mesh.size()} ranks")
        device = torch.device(mesh.device_type)
        options.shape = options.shape or ("llama-3.2-1b" if device.type == "cuda" else "tiny")
        first, failed = None, False
        for way in options.way:
            losses, measured = train(way, device, options)
            first = first or losses
            bound = BOUNDS[options.precision]
            differ = any(abs(a - b) > bound for a, b in zip(losses, first, strict=True))
            failed |= differ
            numbers = " ".join(f"{loss:.5f}" for loss in losses)
            note = f", not those of {options.way[0]}" if differ else ""
            say(f"{way:13} losses {numbers}{note}{measured}")
    return int(failed)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--way", nargs="+", choices=WAYS, default=["eager", "fuse"])
    parser.add_argument("--parallel", choices=("fsdp2", "ddp"), default="fsdp2")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share rows; with fsdp2")
    parser.add_argument("--shape", choices=SHAPES, help="default: llama-3.2-1b, tiny on CPUs")
    parser.add_argument("--batch", choices=BATCHES, default="ones", help="what it masks")
    parser.add_argument("--batch-size", type=int, default=1, help="rows of a rank")
    parser.add_argument("--sequence-length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=COMPARED + 12, help="default: %(default)s")
    parser.add_argument("--precision", choices=BOUNDS, default="bf16")
    parser.add_argument("--whole", action="store_true", help="compile the model, not its layers")
    parser.add_argument("--checkpoint", action="store_true", help="checkpoint each layer")
    parser.add_argument("--inner-backend", default="inductor", help="of backend='liger'")
    options = parser.parse_args()
    if "liger-kernel" in options.way[:-1]:
        parser.error("liger-kernel patches the process, and has to be the last way")
    if options.tp > 1 and (options.parallel == "ddp" or "liger-kernel" in options.way):
        parser.error("--tp is for fsdp2, and the ways but liger-kernel")
    if options.steps <= COMPARED:
        parser.error(f"--steps must be at least {COMPARED + 1}")
    return options


def train(way: str, device: torch.device, options: argparse.Namespace) -> tuple[list[float], str]:
    """Train a model; return the losses of the first steps, and the time and memory as text."""
    torch._dynamo.reset()
    model, vocabulary = build_model(way, device, options)
    loss_of = prepare(model, way, device, options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    # Every group of --tp ranks has its own rows, the same in each step.
    torch.manual_seed(1 + dist.get_rank() // options.tp)
    size = options.batch_size, options.sequence_length
    batch = text_batch(options.batch, size, vocabulary, str(device))

    def step() -> Tensor:
        loss = loss_of(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    losses = []
    for _ in range(COMPARED):
        loss = step()
        dist.all_reduce(loss)
        losses.append(loss.item() / dist.get_world_size())
    if device.type != "cuda":
        return losses, ""
    times, peak = MeasuredDevice("cuda").consecutive(step, options.steps - COMPARED)
    text = f"; {times.p50:.1f} ms ({times.p20:.1f} to {times.p80:.1f})"
    return losses, f"{text}, {largest(peak / 2**30)[0]:.1f} GiB"


def build_model(way: str, device: torch.device, options: argparse.Namespace) -> tuple[Any, int]:
    """Return a model with random weights, and the size of its vocabulary."""
    if way == "liger-kernel":
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    config = config_of(
        options.shape, use_cache=False, tie_word_embeddings=False,
        max_position_embeddings=max(8192, options.sequence_length), **SHAPES[options.shape],
    )  # fmt: skip
    # Every rank makes the same weights.
    torch.manual_seed(0)
    with device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if options.checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train(), config.vocab_size


def prepare(model: Any, way: str, device: torch.device, options: argparse.Namespace) -> Loss:
    """Fuse, compile and distribute a model, and return its loss as a function of a batch."""
    if way == "fuse":
        liger_ops.fuse(model)
    if way == "liger":
        # `fuse` takes loss and masks, across layers; the backend rewrites the layers.
        liger_ops.fuse(model, norms=False, activations=False, rope=False)
    how: dict[str, Any] = {}
    if way in ("liger", "backend"):
        how = {"backend": "liger", "options": {"inner_backend": options.inner_backend}}
    compiles = way in ("compile", "liger", "backend")
    if compiles and not options.whole:
        for layer in model.model.layers:
            layer.compile(**how)
    wrapped = distributed(model, device, options)
    autocast = options.parallel == "ddp" and options.precision == "bf16"

    def loss_of(batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            return wrapped(**batch).loss

    return torch.compile(loss_of, **how) if compiles and options.whole else loss_of


def distributed(model: Any, device: torch.device, options: argparse.Namespace) -> nn.Module:
    """Replicate the model by DDP, or shard it by FSDP2 and with --tp by tensor parallelism."""
    if options.parallel == "ddp":
        ids = [torch.cuda.current_device()] if device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(model, device_ids=ids)
    policy = MixedPrecisionPolicy()
    if options.precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    size = dist.get_world_size() // options.tp, options.tp
    mesh = dist.init_device_mesh(device.type, size, mesh_dim_names=("data", "tp"))
    if options.tp > 1:
        tensor_parallel(model, mesh["tp"])
    # The head belongs to the group of the root module, which stays gathered between the forward and
    # the backward.
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh["data"], mp_policy=policy)
    return model


def tensor_parallel(model: Any, mesh: DeviceMesh) -> None:
    """Shard the weights of the matrix products, and between products the tokens, as DTensors."""
    tokens: dict[str, Any] = {"output_layouts": Shard(1), "use_local_output": False}
    plan: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), **tokens),
        "model.norm": SequenceParallel(),
        # A fused loss leaves the vocabulary sharded, and the ways without one gather the logits.
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        "model.layers.*.input_layernorm": SequenceParallel(),
        "model.layers.*.post_attention_layernorm": SequenceParallel(),
        "model.layers.*.self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        ),
        "model.layers.*.mlp": PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        ),
        "model.layers.*.self_attn.[qkv]_proj": ColwiseParallel(),
        "model.layers.*.mlp.gate_proj": ColwiseParallel(),
        "model.layers.*.mlp.up_proj": ColwiseParallel(),
        "model.layers.*.self_attn.o_proj": RowwiseParallel(**tokens),
        "model.layers.*.mlp.down_proj": RowwiseParallel(**tokens),
    }
    parallelize_module(model, mesh, plan)


if __name__ == "__main__":
    raise SystemExit(main())
