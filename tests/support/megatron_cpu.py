"""A training step of a tiny model of Megatron-Core on CPUs, untouched and with the ops.

Run by torchrun, with a file for the results:

    torchrun --nproc-per-node 2 tests/support/megatron_cpu.py results.json

Rank 0 writes, for each configuration, the largest difference of the losses and of the gradients, in
float32 and relative to the largest value, and how often each op ran.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from liger_ops.integrations import megatron

# Megatron asks for the current GPU by a function that fails without one.
torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]

WORDS, LENGTH, BATCH = 64, 16, 2
BASE = {
    "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2,
    "ffn_hidden_size": 48, "gated_linear_unit": True, "activation_func": torch.nn.functional.silu,
    "bias_activation_fusion": True, "use_cpu_initialization": True, "hidden_dropout": 0.0,
    "attention_dropout": 0.0, "qk_layernorm": True,
}  # fmt: skip
RMS = {"normalization": "RMSNorm", "add_bias_linear": False}
LAYER = {"normalization": "LayerNorm", "add_bias_linear": True}
CENTRED = {"layernorm_zero_centered_gamma": True}
# By the name of a configuration: what Megatron is told, and what of it Megatron's own run leaves
# out. Its fused loss rounds gradients to bfloat16, and its norms of PyTorch take neither sequence
# parallelism nor centred weights, which begin as the same norms.
CONFIGURATIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "rms_norm": (RMS, {}),
    "layer_norm": (LAYER, {}),
    "deterministic": (RMS, {"deterministic_mode": True}),
    "fused loss": (RMS, {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "native"}),
    "centred rms_norm": (RMS, CENTRED),
    "centred layer_norm": (LAYER, CENTRED),
    "sequence parallel": (RMS, {"sequence_parallel": True}),
}


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the ops that run within."""
    calls: Counter[str] = Counter()
    with torch.profiler.profile() as profile:
        yield calls
    for event in profile.key_averages():
        if event.key.startswith("liger::"):
            calls[event.key.removeprefix("liger::")] += event.count


def step(options: dict[str, Any], ranks: int) -> list[Tensor]:
    """Build the model anew, and return its losses and gradients."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(0)
    config = TransformerConfig(**BASE, **options, tensor_model_parallel_size=ranks)
    spec = get_gpt_layer_local_spec(normalization=config.normalization, qk_layernorm=True)
    model = GPTModel(config, spec, WORDS, LENGTH, position_embedding_type="learned_absolute")
    torch.manual_seed(1)
    ids = torch.randint(WORDS, (BATCH, LENGTH))
    places = torch.arange(LENGTH).expand(BATCH, -1)
    masked = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    losses = model(ids, places, masked, labels=ids.roll(-1, 1))
    losses.mean().backward()
    for name, parameter in model.named_parameters():
        # The gradients that Megatron's training loop adds up over tensor-parallel ranks.
        heads = "q_layernorm" in name or "k_layernorm" in name
        if heads or getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(parameter.grad)
    return [losses.detach(), *(parameter.grad for parameter in model.parameters())]


def relative(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """Return the largest difference, relative to the largest value."""
    differences = [(one - other).abs().max() for one, other in zip(ours, theirs, strict=True)]
    return float(max(differences) / max(other.abs().max() for other in theirs))


def compared(base: dict[str, Any], added: dict[str, Any], ranks: int) -> dict[str, Any]:
    theirs = step(base, ranks)
    megatron.install()
    try:
        with counted() as calls:
            ours = step(base | added, ranks)
        again = step(base | added, ranks)
    finally:
        megatron.uninstall()
    restored = step(base, ranks)
    return {
        "loss": relative(ours[:1], theirs[:1]),
        "gradients": relative(ours[1:], theirs[1:]),
        "same bits again": all(map(torch.equal, ours, again)),
        "restored": all(map(torch.equal, restored, theirs)),
        "ops": dict(calls),
    }


def main() -> None:
    dist.init_process_group("gloo")
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    ranks = dist.get_world_size()
    parallel_state.initialize_model_parallel(ranks)
    # Dropout of attention asks for this state of a GPU's generator, also where it drops nothing.
    tracker = get_cuda_rng_tracker()
    tracker.fork = lambda *_: contextlib.nullcontext()
    results = {}
    for name, (base, added) in CONFIGURATIONS.items():
        if ranks == 1 and "sequence_parallel" in added:
            continue
        torch.use_deterministic_algorithms(added.get("deterministic_mode", False))
        results[name] = compared(base, added, ranks)
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
