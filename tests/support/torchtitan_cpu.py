"""torchtitan's trainer on CPUs: `torchrun torchtitan_cpu.py RESULTS torchtitan's arguments`.

It trains a model's first layers for three steps on texts that this file makes. The first rank
writes the losses, the norms of the gradients, and how often each op and collective ran, as JSON.

Parts of torchtitan that need a GPU are replaced: queries of the device's memory by constants,
flex_attention, whose backward does not run on a CPU, by `scaled_dot_product_attention` with a dense
mask, and NCCL's scaled sum by a sum.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import tokenizers
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.profiler import ProfilerActivity, profile

LAYERS = 2
# A test imports these too, in an environment without torchtitan.
OPTIONS = [
    *("--training.steps", "3", "--training.local_batch_size", "2", "--training.seq_len", "64"),
    *("--training.disable_cuda_graphs", "--validator.no-enable", "--checkpoint.no-enable"),
    *("--training.mixed_precision_param", "float32", "--debug.seed", "0"),
]


def torchtitan_on_cpus() -> Any:
    """Import torchtitan's trainer module, which reads the device at import, for CPUs."""
    torch._utils._get_available_device_type = lambda: "cpu"
    torch.cpu.get_device_name = lambda device=None: "CPU"
    torch.cpu.get_device_properties = lambda device=None: SimpleNamespace(total_memory=2**30)
    torch.cpu.memory_stats = lambda device=None: {}
    torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda device=None: None

    from torchtitan import trainer
    from torchtitan.distributed import fsdp
    from torchtitan.hf_datasets import text_datasets
    from torchtitan.models.common import attention

    attention.FlexAttention._compiled_flex_attn = staticmethod(dense_attention)
    attention._compiled_create_block_mask = attention.create_block_mask
    trainer.dist_utils.set_pg_timeouts = lambda **options: None
    trainer.time = SimpleNamespace(sleep=lambda seconds: None, perf_counter=time.perf_counter)
    without_division = fsdp.disable_fsdp_gradient_division

    def summed(model: nn.Module) -> None:
        without_division(model)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)

    fsdp.disable_fsdp_gradient_division = summed
    text_datasets.DATASETS["c4_test"].loader = lambda path: texts()
    return trainer


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, *, block_mask: Any, scale: Any, enable_gqa: bool, **_: Any
) -> tuple[Tensor, None]:
    batch = torch.arange(q.shape[0])[:, None, None, None]
    rows, columns = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    mask = block_mask.mask_mod(batch, torch.zeros_like(batch), rows, columns)
    return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=enable_gqa), None


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of bytes."""
    words = [*sorted(ByteLevel.alphabet()), "<s>", "</s>"]
    model = tokenizers.models.BPE({word: index for index, word in enumerate(words)}, [])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))


def texts() -> datasets.Dataset:
    rows = [" ".join(str(n * k % 97) for k in range(1, 12 + n % 29)) for n in range(200)]
    return datasets.Dataset.from_dict({"text": rows})


def train(arguments: list[str], tokenizer: str) -> dict[str, Any]:
    trainer_module = torchtitan_on_cpus()
    from torchtitan.config import ConfigManager

    # A subcommand, such as activation-checkpoint:full, ends torchtitan's own arguments.
    config = ConfigManager().parse_args(
        [*arguments[:4], *OPTIONS, "--hf_assets_path", tokenizer, *arguments[4:]]
    )
    del config.model_spec.model.layers[LAYERS:]
    trainer = trainer_module.Trainer(config)
    steps: list[tuple[float, float]] = []

    def log(step: int, loss: float, greatest: float, norm: float, **_: Any) -> None:
        steps.append((loss, norm))

    trainer.metrics_processor.log = log
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        trainer.train()
    trainer.close()
    names = [event.name.split("::") for event in profiled.events()]
    calls = Counter(name[1] for name in names if name[0] == "liger")
    collectives = Counter(name[0] for name in names if name[0].startswith("gloo:"))
    return {"steps": steps, "ops": calls, "collectives": collectives}


def main() -> None:
    results, *arguments = sys.argv[1:]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        result = train(arguments, folder)
    if dist.get_rank() == 0:
        Path(results).write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
