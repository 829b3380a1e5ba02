"""Make the measurements of a report, in this process."""

from __future__ import annotations

import argparse
import gc
import importlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import liger_ops

from .. import records
from ..command_line import carried_out
from ..measure import Run
from ..providers import OURS, PROVIDERS
from ..steps.model import measure
from ..steps.models import TEXT, config_of
from ..timing import Accelerator, find
from ..training import drawn, ops_run, train
from ..workloads import selected
from .plan import ON_A_CPU, Measurement

BOOK = Path(__file__).with_name("paradise_lost.txt")
STEPS = 500
RATE = 5e-4
# Steps, rows and tokens of a row, and the options of the configurations.
SIZE, QUICK_SIZE = (STEPS, 8, 512), (6, 2, 32)
SMALL = {
    "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6, "head_dim": 64,
    "num_attention_heads": 8, "num_key_value_heads": 4,
}  # fmt: skip
TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
BYTES = {
    "vocab_size": 256, "max_position_embeddings": 512, "use_cache": False, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
# Options of families that have them: a window shorter than a row, and experts for a small model.
OWN = {
    "gemma3": {"sliding_window": 128},
    "gpt-oss": {"sliding_window": 128, "num_local_experts": 8, "num_experts_per_tok": 2},
}


class CPU(Accelerator):
    """A CPU on which a run of the bench checks every call, and times none."""

    is_simulated = True

    def __init__(self) -> None:
        super().__init__("cpu")

    def flush_cache(self) -> None:
        """Do nothing: no time of a CPU is kept."""

    def head_start(self) -> None:
        """Do nothing: no time of a CPU is kept."""

    def free_memory(self) -> int:
        return 2**20

    def release_memory(self) -> None:
        """Do nothing: PyTorch's allocator of the CPU keeps nothing."""

    def capture(self, function: Callable[[], Any]) -> Callable[[], Any]:
        return function


class RunOnCPU(Run):
    def _measure_rates(self) -> None:
        """Do nothing: no share of a CPU's rates is kept."""


def prepare(measurement: Measurement) -> None:
    """Import what a measurement needs, and start the GPU: 11 s of a process on an H200's machine,
    which pass while another has its turn."""
    if torch.cuda.is_available():
        torch.ones(8, 8, device="cuda").mm(torch.ones(8, 8, device="cuda"))
    if measurement.part in ("steps", "curves"):
        # It imports the file of the model.
        with torch.device("meta"):
            transformers.AutoModelForCausalLM.from_config(config_of(measurement.words[0]))
    for module in ("torch._inductor.compile_fx", "torch._dynamo.backends.registry"):
        importlib.import_module(module)
    if measurement.words[-1] == "liger-kernel":
        importlib.import_module("liger_kernel.transformers")


def measured(measurement: Measurement, clock: Callable[[], float]) -> dict[str, Any]:
    """Return what is measured. `clock` times compilations."""
    if measurement.part == "steps":
        return _step(*measurement.words, clock=clock, quick=measurement.quick)
    if measurement.part == "curves":
        return _curve(*measurement.words, quick=measurement.quick)
    return _op(*measurement.words)


def _step(
    shape: str, batch: str, way: str, *, clock: Callable[[], float], quick: bool
) -> dict[str, Any]:
    rows, length = TEXT[shape][3]
    options = argparse.Namespace(
        ways=[way], shape=shape, batch=batch, batch_size=rows, sequence_length=length,
        layers=None, steps=2 if quick else 10, autocast=False, checkpoint=False,
    )  # fmt: skip
    result = measure(options, clock)
    # Another batch may follow in this process.
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        return result
    return {"losses": result["losses"], "note": ON_A_CPU}


def _op(op: str, shapes: str) -> dict[str, Any]:
    workloads = selected([op], shapes.split(","), ["bfloat16"])
    said: list[str] = []
    if torch.cuda.is_available():
        accelerator = find("cuda")
        run = Run(accelerator, workloads, PROVIDERS, say=said.append)
    else:
        accelerator = CPU()
        run = RunOnCPU(accelerator, workloads, (OURS, "eager"), say=said.append)
    points, shared = carried_out(run, accelerator, None)
    lost = [text for text in said if text.startswith("the device is lost")]
    found = records.as_records(points, *shared.values())
    return {"points": found, "missing": run.peers.missing, "lost": lost}


def _curve(shape: str, way: str, *, quick: bool) -> dict[str, Any]:
    """Train a small model of a family on the text, and return the loss of each step. All ways begin
    with the same parameters, up to rounding, and see the same batches."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = QUICK_SIZE if quick else SIZE
    batches = drawn(BOOK.read_bytes(), size, 0, device)
    model = curve_model(shape, way, quick, device)
    if way == "fused":
        liger_ops.fuse(model)

    def loss_of(batch: Tensor) -> Tensor:
        return model(input_ids=batch, labels=batch).loss

    called: Callable[[Tensor], Tensor] = loss_of
    if way == "liger":
        # A CPU would spend minutes on C++.
        options: Any = {} if device == "cuda" else {"inner_backend": "aot_eager"}
        called = torch.compile(loss_of, fullgraph=True, backend="liger", options=options)
    began = time.perf_counter()
    losses, _ = train(model, called, batches, len(batches), RATE)
    seconds = time.perf_counter() - began
    ops = ops_run(lambda: called(batches[-1]).backward())
    if way in ("fused", "liger") and not ops:
        raise RuntimeError(f"the model was trained without any op of liger_ops: {way}")
    rounded = [round(loss, 6) for loss in losses]
    result: dict[str, Any] = {"losses": rounded, "ops": dict(sorted(ops.items())), "size": size}
    return result | ({} if device == "cpu" else {"training_s": seconds})


def curve_model(shape: str, way: str, quick: bool, device: str) -> Any:
    """Return an untouched model of a family, in float32 for that way and otherwise in bfloat16."""
    sizes = (TINY if quick else SMALL) | BYTES | OWN.get(shape, {})
    config = config_of(shape, **sizes)
    make = transformers.AutoModelForCausalLM.from_config
    torch.manual_seed(0)
    with torch.device(device):
        model = make(config, dtype=torch.float32).train()
        if way == "float32":
            return model
        # A cast of the model would round the rotary frequencies, too.
        rounded = make(config, dtype=torch.bfloat16).train()
    rounded.load_state_dict(model.state_dict())
    return rounded
