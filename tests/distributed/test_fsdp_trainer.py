"""transformers' Trainer with FSDP2, by its arguments or accelerate's file, trains as in one
process."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate import DistributedType, FullyShardedDataParallelPlugin
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from torch import Tensor
from torch.distributed.tensor import DTensor

import ranks
from liger_ops import backend, fuse
from sharded_training import BOUND, Graphs, batch, full, made

pytestmark = pytest.mark.device_kernels

SECONDS = 400
STEPS = 2
FSDP = {
    "version": 2,
    "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "reshard_after_forward": True,
}

ARGUMENTS: dict[str, Any] = {"fsdp": "full_shard auto_wrap", "fsdp_config": FSDP}
# As `accelerate config` writes it.
FILE = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_reshard_after_forward: true
  fsdp_cpu_ram_efficient_loading: false
mixed_precision: 'no'
num_machines: 1
num_processes: 2
"""


class OnCPUsToo(transformers.Trainer):
    """accelerate takes the FSDP of its configuration on accelerators only: it is made to here."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if ranks.DEVICE != "cpu":
            return
        state: Any = self.accelerator.state
        state.fsdp_plugin = FullyShardedDataParallelPlugin(**(self.args.fsdp_plugin_args or {}))
        state._shared_state["distributed_type"] = DistributedType.FSDP
        self.is_fsdp_enabled = True


def rows() -> list[dict[str, Tensor]]:
    """The rows of all steps. Ranks take them in turn."""
    whole = batch(0, STEPS * dist.get_world_size())
    return [{name: x[i].cpu() for name, x in whole.items()} for i in range(len(whole["labels"]))]


def trained_by_trainer(
    change: Callable[[Any], Any], arguments_of_fsdp: dict[str, Any]
) -> tuple[list[float], dict[str, Tensor]]:
    """The losses that a Trainer logs, and the weights after its steps."""
    rank, world = dist.get_rank(), dist.get_world_size()
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world)
    )
    model = made()
    change(model)
    # A DataLoader draws its seed on the default device, by a generator of the CPU.
    with tempfile.TemporaryDirectory() as folder, torch.device("cpu"):
        arguments = transformers.TrainingArguments(
            folder, use_cpu=ranks.DEVICE == "cpu", report_to=[], max_steps=STEPS, logging_steps=1,
            per_device_train_batch_size=2, learning_rate=0.1, optim="sgd", max_grad_norm=0.0,
            lr_scheduler_type="constant", save_strategy="no", disable_tqdm=True,
            train_sampling_strategy="sequential", **arguments_of_fsdp,
        )  # fmt: skip
        trainer = OnCPUsToo(model, arguments, train_dataset=rows())
        trainer.train()
    held = list(trainer.model.parameters())
    assert all(isinstance(parameter, DTensor) for parameter in held)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    named = trainer.model.named_parameters()
    return losses, {name: full(parameter.detach()) for name, parameter in named}


def in_one_process() -> tuple[list[float], dict[str, Tensor]]:
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found, losses = rows(), []
    size = len(found) // STEPS
    for step in range(STEPS):
        part = found[step * size : (step + 1) * size]
        given = {name: torch.stack([row[name] for row in part]) for name in part[0]}
        loss = model(**{name: x.to(ranks.DEVICE) for name, x in given.items()}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: parameter.detach() for name, parameter in model.named_parameters()}


def check(change: Callable[[Any], Any], arguments_of_fsdp: dict[str, Any] = ARGUMENTS) -> None:
    losses, weights = trained_by_trainer(change, arguments_of_fsdp)
    true_losses, true_weights = in_one_process()
    # The log rounds to four places.
    assert losses == pytest.approx(true_losses, abs=1e-4)
    for name, weight in true_weights.items():
        assert (weights[name] - weight).norm() <= BOUND * weight.norm(), name


def fused() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="liger_ops")
        check(fuse)


def layers_are_compiled() -> None:
    graphs = Graphs()

    def change(model: Any) -> None:
        fuse(model, norms=False, activations=False, rope=False)
        for layer in model.model.layers:
            layer.compile(backend=backend, options={"inner_backend": graphs, "strict": True})

    check(change)
    for name in ("rope", "swiglu", "fused_add_rms_norm"):
        assert graphs.nodes(name), name


def environment_of(text: str) -> dict[str, str]:
    """The variables that `accelerate launch --config_file` sets for FSDP."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(text)
        file.flush()
        arguments = launch_command_parser().parse_args(["--config_file", file.name, "train.py"])
        arguments, *_ = _validate_launch_command(arguments)
    return {name: v for name, v in prepare_multi_gpu_env(arguments).items() if "FSDP" in name}


def configured_by_a_file() -> None:
    found = environment_of(FILE)
    os.environ.update(found)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="liger_ops")
            check(fuse, {})
    finally:
        for name in found:
            del os.environ[name]


CHECKS = [fused, layers_are_compiled, configured_by_a_file]

test_fsdp_trainer = ranks.tests({2: CHECKS}, SECONDS)
