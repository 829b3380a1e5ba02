"""Time a whole training step of an untouched model on a GPU, compiled in several ways.

    python -m liger_ops.bench step --model llama-3.2-1b   # the ways of the README's table
    python -m liger_ops.bench.steps.model [--help]

Each way runs in a fresh process. The model has random weights: a language model of transformers, by
default a Llama with a tied head, or a UNet, in bfloat16 (or with --autocast in float32, which is
what a Trainer's bf16=True does). A step is forward, backward and fused AdamW. Times are device
times: the median step with the 20th and 80th percentiles, after the seconds that the first steps
took with the compilation. A way whose first losses differ from the eager model's is not timed. The
exit status is 1 if there is such a way, or one that fails.

    eager           the model as it is
    compile         torch.compile
    causal          torch.compile, attention made causal by hand, without any mask; only for text
    liger           torch.compile(backend="liger")
    liger-all       the same, including the rewrites that are left to Inductor by default
    enabled         torch.compile after liger_ops.enable()
    liger-graphs    the same as liger, with mode="reduce-overhead"
    flex            torch.compile, with transformers' own flex_attention; only for text
    fused           the model after liger_ops.fuse(), eager
    fused-compile   torch.compile of the fused model
    fused-invariant the fused model within liger_ops.invariant(), eager
    liger-invariant the same as liger, within liger_ops.invariant()
    hub             torch.compile of a model with the layers of a build for the kernels hub: norms,
                    rotary embedding, MLPs, experts, the loss and attention; only if `kernels` is
                    installed
    liger-kernel    a model patched by Liger-Kernel, eager; only if it is installed

Needs transformers beside liger_ops. On a machine without a GPU a small model runs on the CPU, whose
figures say nothing of a GPU, and the exit status is 2. Nearly all of its time is the compilation,
in which Inductor has a C++ compiler translate each kernel. Standard error tells what runs.
"""

from __future__ import annotations

import argparse
import atexit
import importlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import nullcontext, suppress
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.torch_version import TorchVersion

import liger_ops

from ...device import MeasuredDevice
from .models import BATCHES, CHANNELS_LAST, TEXT, UNETS, Batch, text_model, unet

SHAPES = (*TEXT, *UNETS, *(name + CHANNELS_LAST for name in UNETS))

DEFAULT_WAYS = ("eager", "compile", "causal", "liger", "liger-all", "enabled", "liger-graphs")
INVARIANT = ("fused-invariant", "liger-invariant")
WAYS = (*DEFAULT_WAYS, "flex", "fused", "fused-compile", *INVARIANT, "hub", "liger-kernel")
README_WAYS = ("eager", "compile", "liger-kernel", "liger", "enabled", "fused", "fused-compile")
LLAMAS = ("llama-3.2-1b", "tiny")
# The functions of Liger-Kernel that patch a model's file.
PATCHES = {"gemma3": "gemma3_text", "gpt-oss": "gpt_oss"} | dict.fromkeys(LLAMAS, "llama")
PATCHES |= {"qwen3-moe": "qwen3_moe", "deepseek-v3": "deepseek_v3"}
PATCHES |= {name: name for name in ("qwen3", "mistral", "gemma2", "llama4")}
# Way -> the shapes that it applies to, if these are not all.
FOR: dict[str, Container[str]] = {
    "causal": TEXT, "flex": TEXT, "hub": TEXT, "liger-kernel": PATCHES,
}  # fmt: skip
# Way -> the package that it needs.
NEEDS = {"hub": "kernels", "liger-kernel": "liger-kernel"}
# Package that an installed package requires -> its name in messages, if it needs a GPU.
FOR_GPUS = {"triton": "Triton", "nvidia-cutlass-dsl": "CUTLASS"}
UNCOMPILED = ("eager", "fused", "fused-invariant", "liger-kernel")
COMPILED_FIRST = "runs, compiled first: a minute or more if nothing is cached ..."
WARM_UP = 4
# bfloat16 steps round in different places; measured on an H200, llama-3.2-1b: 1e-3.
LOSS_BOUND = 2e-2


def main(arguments: Sequence[str] | None = None, default: Sequence[str] = DEFAULT_WAYS) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ways", nargs="*", default=default, metavar="WAY", help=f"of {WAYS}")
    parser.add_argument(
        "--shape", "--model", choices=SHAPES, help="default: llama-3.2-1b, tiny on a CPU"
    )
    parser.add_argument("--batch", choices=BATCHES, default="none", help="text: what it masks")
    parser.add_argument("--batch-size", type=int, help="default: that of the shape, 2 on a CPU")
    parser.add_argument("--sequence-length", type=int, help="the same, 32 on a CPU")
    parser.add_argument("--layers", type=int, help="text: default: those of the shape")
    parser.add_argument("--autocast", action="store_true", help="text: float32 under autocast")
    parser.add_argument("--checkpoint", action="store_true", help="text: recompute each layer")
    parser.add_argument("--steps", type=int, default=20, help="timed; default: %(default)s")
    parser.add_argument("--json", metavar="FILE", help="write what was measured")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    on_gpu = torch.cuda.is_available()
    wanted = options.shape or "llama-3.2-1b"
    options.shape = "tiny" if not on_gpu and wanted in TEXT else wanted
    rows, length = TEXT[options.shape][3] if on_gpu and options.shape in TEXT else (2, 32)
    options.batch_size = options.batch_size or (8 if on_gpu and options.shape in UNETS else rows)
    options.sequence_length = options.sequence_length or length
    if options.one:
        print(json.dumps(measure(options)))
        return 0
    if not on_gpu:
        print(f"no GPU: {options.shape}, a small model, runs on the CPU, not {wanted}", flush=True)
    results: dict[str, dict[str, Any]] = {}
    right: dict[str, dict[str, Any]] = {}
    for way in options.ways:
        if options.shape not in FOR.get(way, SHAPES):
            continue
        if way in NEEDS and (lacking := lacks(NEEDS[way], on_gpu)):
            print(f"{way:14} {lacking}", flush=True)
            continue
        told = "runs ..." if way in UNCOMPILED else COMPILED_FIRST
        print(f"{way:14} {told}", file=sys.stderr, flush=True)
        result = results[way] = FreshStep(way, options).measured()
        wrong = "error" in result or differs(result, results.get("eager"))
        right |= {} if wrong else {way: result}
        print(line(way, result, wrong, results.get("causal")), flush=True)
    print(table(options.shape, right))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)
    return 1 if len(right) < len(results) else 0 if on_gpu else 2


def lacks(package: str, on_gpu: bool) -> str:
    """Return the reason that a package cannot run here, or an empty string."""
    try:
        required = requires(package) or []
    except PackageNotFoundError:
        return "is not installed"
    if package == NEEDS["hub"]:
        # Importing it takes a second, for Dynamo.
        from ...hub.layers import TRACES

        there = TRACES and TorchVersion(transformers.__version__) >= "5.20"
        return "" if there else "compiles layers with torch 2.13 and transformers 5.20, or later"
    names = [re.split(r"[^\w.-]", line)[0] for line in required if "extra ==" not in line]
    tools = [FOR_GPUS[name] for name in names if name in FOR_GPUS]
    return "" if on_gpu or not tools else f"needs a GPU: its kernels are made with {tools[0]}"


class FreshProcess:
    """A Python process, which runs while others do."""

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", *arguments], env=environment, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip

    def outcome(self, timeout: float | None = None) -> str | dict[str, Any]:
        """Wait until the process ends; return its standard output, or `error` with the line that
        says why it failed."""
        try:
            output, errors = self._process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            return {"error": f"it was stopped after {timeout:.0f} s"}
        finally:
            self.end()
        if self._process.returncode == 0:
            return output
        lines = errors.strip().splitlines() or [
            f"exit status {self._process.returncode}, no message"
        ]
        raised = [
            line for line in lines if re.match(r"[\w.]+(Error|Exception|Failed|Unsupported)", line)
        ]
        return {"error": (raised or lines)[-1]}

    def end(self) -> None:
        """Stop the process, and those that it has started, if they have not ended: compilers and
        Inductor's workers hold its output open."""
        self.kill()
        self._process.communicate()

    def kill(self) -> None:
        """Stop them, and leave the rest of `end` to a thread that waits for `outcome`."""
        if os.name == "posix":
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        else:
            self._process.kill()


class FreshStep(FreshProcess):
    """A process that measures a way."""

    def __init__(self, way: str, options: argparse.Namespace) -> None:
        arguments = ["liger_ops.bench.steps.model", way, "--one"]
        for name in ("shape", "batch", "batch_size", "sequence_length", "layers", "steps"):
            if (value := getattr(options, name)) is not None:
                arguments += [f"--{name.replace('_', '-')}", str(value)]
        arguments += [f"--{flag}" for flag in ("autocast", "checkpoint") if getattr(options, flag)]
        super().__init__(arguments)

    def measured(self) -> dict[str, Any]:
        """Return what was measured, or `error` with the reason."""
        outcome = self.outcome()
        if isinstance(outcome, dict):
            return outcome
        result: dict[str, Any] = json.loads(outcome.strip().splitlines()[-1])
        return result


def differs(result: dict[str, Any], eager: dict[str, Any] | None) -> bool:
    if eager is None or "error" in eager:
        return False
    pairs = zip(result["losses"], eager["losses"], strict=True)
    return not all(abs(a - b) <= LOSS_BOUND for a, b in pairs)


def line(way: str, result: dict[str, Any], wrong: bool, causal: dict[str, Any] | None) -> str:
    if "error" in result:
        return f"{way:14} failed: {result['error']}"
    losses = "losses " + " ".join(f"{loss:.4f}" for loss in result["losses"])
    if wrong:
        return f"{way:14} is not eager's: {losses}"
    times = f"{result['warm_up_s']:5.0f} s, then {result['ms']:6.1f} ms"
    times += f" ({result['ms_20']:.1f} to {result['ms_80']:.1f})"
    share = ""
    if causal is not None and "ms" in causal:
        share = f"  {result['ms'] / causal['ms']:.3f} of causal"
    return f"{way:14} {times}, {result['gib']:5.3g} GiB{share}; {losses}"


def table(shape: str, results: Mapping[str, dict[str, Any]]) -> str:
    """Format the ways as the README shows them."""
    devices = {result["device"] for result in results.values()}
    rows = [(f"training step, {', '.join((shape, *devices))}", "ms", "peak GiB"), ("---",) * 3]
    rows += [(way, f"{row['ms']:.1f}", f"{row['gib']:.3g}") for way, row in results.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def measure(
    options: argparse.Namespace, clock: Callable[[], float] = time.perf_counter
) -> dict[str, Any]:
    """Measure one way, in this process. `clock` times the first steps."""
    with liger_ops.invariant() if options.ways[0] in INVARIANT else nullcontext():
        return _measure(options, clock)


def _measure(options: argparse.Namespace, clock: Callable[[], float]) -> dict[str, Any]:
    (way,) = options.ways
    if way == "liger-kernel":
        patches = importlib.import_module("liger_kernel.transformers")
        getattr(patches, f"apply_liger_kernel_to_{PATCHES[options.shape]}")()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    attention = {"causal": causal_by_hand, "flex": lambda: "flex_attention"}.get(way, lambda: None)
    size = (options.batch_size, options.sequence_length)
    if options.shape in TEXT:
        form = (options.layers, options.autocast)
        made = text_model(options.shape, options.batch, size, device, attention(), *form)
    else:
        made = unet(options.shape, options.batch_size, device)
    model, loss_of, batch = made
    if options.checkpoint:
        model.gradient_checkpointing_enable()  # type: ignore[operator]
    if way.startswith("fused"):
        liger_ops.fuse(model)
    if way == "hub":
        with_hub_layers(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    loss_of = compiled(way, loss_of)

    def step() -> Tensor:
        if way.endswith("graphs"):
            torch.compiler.cudagraph_mark_step_begin()
        loss = loss_of(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach().clone()

    started = clock()
    result: dict[str, Any] = {"losses": [loss.item() for loss in [step() for _ in range(WARM_UP)]]}
    result["warm_up_s"] = clock() - started
    measured = MeasuredDevice(device)
    times, peak = measured.consecutive(step, options.steps)
    result["device"] = platform.machine()
    if device == "cuda":
        # The allocator's own peak does not include the pools of CUDA graphs.
        free, total = torch.cuda.mem_get_info()
        result |= {"held_gib": (total - free) / 2**30, "device": measured.name}
    result |= {"ms": times.p50, "ms_20": times.p20, "ms_80": times.p80, "gib": peak / 2**30}
    result["versions"] = {"torch": torch.__version__, "transformers": transformers.__version__}
    return result


def with_hub_layers(model: torch.nn.Module) -> None:
    """Give a model all layers of a build of this package for the kernels hub."""
    from ...hub import build, local

    # The process measures this way alone, and may load more of the build until its end.
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    build.write(folder)
    local.kernelize(model, folder)
    local.use_attention(model, folder)


def causal_by_hand() -> str:
    """Register an attention for transformers that never makes a mask, and return its name."""

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, **options: Any
    ) -> tuple[Tensor, None]:
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=options.get("scaling"), enable_gqa=True
        )
        return out.transpose(1, 2).contiguous(), None

    transformers.AttentionInterface.register("causal_by_hand", attend)
    transformers.AttentionMaskInterface.register("causal_by_hand", lambda *args, **kwargs: None)
    return "causal_by_hand"


def compiled(way: str, function: Callable[[Batch], Tensor]) -> Callable[[Batch], Tensor]:
    if way in UNCOMPILED:
        return function
    if way == "enabled":
        liger_ops.enable()
    if way in ("compile", "causal", "enabled", "flex", "fused-compile", "hub"):
        # transformers makes its block masks outside of the graph.
        return torch.compile(function, fullgraph=way != "flex")
    options: dict[str, Any] = {"rewrites": "all"} if way == "liger-all" else {}
    if way == "liger-graphs":
        return torch.compile(function, fullgraph=True, backend="liger", mode="reduce-overhead")
    return torch.compile(function, fullgraph=True, backend="liger", options=options)


if __name__ == "__main__":
    raise SystemExit(main())
