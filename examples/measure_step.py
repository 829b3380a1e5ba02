"""Time a whole training step of an untouched model on a GPU, compiled in several ways.

    python examples/measure_step.py [--help]

Each way runs in a fresh process: a language model of transformers with random weights, bfloat16 and
SDPA, by default a Llama with a tied head, or a UNet; a step is forward, backward and fused AdamW.
Times are of the device, by its events: the median step with the 20th and the 80th percentile. A way
whose first losses differ from the eager model's is not timed. The exit status is 1 if there was
such a one, or one that failed.

    eager           as it comes
    compile         torch.compile
    causal          torch.compile, its attention made causal by hand: no mask is in memory; of texts
    liger           torch.compile(backend="liger")
    liger-all       the same, with the rewrites too that are by default left to Inductor
    enabled         torch.compile after liger_ops.enable()
    liger-graphs    the same as liger, with mode="reduce-overhead"
    liger-kernel    a Llama patched by Liger-Kernel, eager; only where that is installed

Needs transformers beside liger_ops. On a machine without a GPU nothing is timed: the losses are
compared, of a small model, and the exit status is 2.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from step_models import CONFIGS, SHAPES, make
from torch import Tensor

WAYS = [
    *("eager", "compile", "causal", "liger", "liger-all", "enabled", "liger-graphs"),
    "liger-kernel",
]
# The shapes that a way is for, where it is not for all.
FOR = {"causal": CONFIGS, "liger-kernel": ("llama-3.2-1b", "tiny")}
WARM_UP = 4
# bfloat16 steps that round in other places; measured on an H200, llama-3.2-1b: 1e-3.
LOSS_BOUND = 2e-2


def main(arguments: list[str] | None = None) -> int:
    options = make_parser().parse_args(arguments)
    if options.one:
        print(json.dumps(measure(options)))
        return 0
    timed = torch.cuda.is_available()
    if not timed:
        print("no GPU: a small model's losses are compared, and nothing is timed", flush=True)
    results: dict[str, dict[str, Any]] = {}
    failed = False
    for way in options.ways:
        if options.shape is not None and options.shape not in FOR.get(way, SHAPES):
            continue
        if way == "liger-kernel" and importlib.util.find_spec("liger_kernel") is None:
            print(f"{way:14} is not installed", flush=True)
            continue
        result = in_a_fresh_process(way, options)
        wrong = "error" in result or differs(result, results.get("eager"))
        failed |= wrong
        results[way] = result
        print(line(way, result, wrong, results.get("causal")), flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)
    return 1 if failed else 0 if timed else 2


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ways", nargs="*", default=WAYS[:-1], metavar="WAY", help=f"of {WAYS}")
    parser.add_argument(
        "--shape", choices=SHAPES, help="of the model; default: llama-3.2-1b, tiny on a CPU"
    )
    parser.add_argument("--batch-size", type=int, help="default: 8, 2 on a CPU")
    parser.add_argument("--sequence-length", type=int, help="default: 2048, 32 on a CPU")
    parser.add_argument("--steps", type=int, default=20, help="timed; default: %(default)s")
    parser.add_argument("--json", metavar="FILE", help="write what was measured")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    return parser


def in_a_fresh_process(way: str, options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, way, "--one", "--steps", str(options.steps)]
    for name in ("shape", "batch_size", "sequence_length"):
        if (value := getattr(options, name)) is not None:
            command += [f"--{name.replace('_', '-')}", str(value)]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode != 0:
        return {"error": (run.stderr.strip().splitlines() or ["no message"])[-1]}
    result: dict[str, Any] = json.loads(run.stdout.strip().splitlines()[-1])
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
    if "ms" not in result:
        return f"{way:14} {losses}"
    share = ""
    if causal is not None and "ms" in causal:
        share = f"  {result['ms'] / causal['ms']:.3f} of causal"
    low, high = result["ms_20"], result["ms_80"]
    return (
        f"{way:14} {result['ms']:6.1f} ms ({low:.1f} to {high:.1f}), "
        f"{result['gib']:5.1f} GiB{share}; {losses}"
    )


def measure(options: argparse.Namespace) -> dict[str, Any]:
    (way,) = options.ways
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    shape = options.shape or ("llama-3.2-1b" if on_gpu else "tiny")
    batch_size = options.batch_size or (8 if on_gpu else 2)
    length = options.sequence_length or (2048 if on_gpu else 32)

    if way == "liger-kernel":
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    attention = causal_by_hand() if way == "causal" else None
    trained = make(shape, device, batch_size, length, attention)
    optimizer = torch.optim.AdamW(trained.model.parameters(), lr=1e-5, fused=True)
    loss_of = compiled(way, trained.loss)

    def step() -> Tensor:
        if way.endswith("graphs"):
            torch.compiler.cudagraph_mark_step_begin()
        loss = loss_of(trained.batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach().clone()

    started = time.perf_counter()
    losses = [step() for _ in range(WARM_UP)]
    result: dict[str, Any] = {"losses": [loss.item() for loss in losses]}
    result["warm_up_s"] = time.perf_counter() - started
    if on_gpu:
        result |= timed(step, options.steps)
        # What CUDA graphs allocate is in pools that the allocator's own peak leaves out.
        free, total = torch.cuda.mem_get_info()
        result["held_gib"] = (total - free) / 2**30
        result["device"] = torch.cuda.get_device_name()
    result["versions"] = {"torch": torch.__version__, "transformers": transformers.__version__}
    return result


def causal_by_hand() -> str:
    """The name of an attention for transformers that never makes a mask."""

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


def compiled(way: str, function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    if way in ("eager", "liger-kernel"):
        return function
    if way == "enabled":
        import liger_ops

        liger_ops.enable()
    if way in ("compile", "causal", "enabled"):
        return torch.compile(function, fullgraph=True)
    options = {"rewrites": "all"} if way == "liger-all" else {}
    if way == "liger-graphs":
        return torch.compile(function, fullgraph=True, backend="liger", mode="reduce-overhead")
    return torch.compile(function, fullgraph=True, backend="liger", options=options)


def timed(step: Callable[[], Tensor], steps: int) -> dict[str, float]:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False)]
    low, *_, high = statistics.quantiles(times, n=5)
    gib = torch.cuda.max_memory_allocated() / 2**30
    return {"ms": statistics.median(times), "ms_20": low, "ms_80": high, "gib": gib}


if __name__ == "__main__":
    raise SystemExit(main())
