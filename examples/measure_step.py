"""Time a whole training step of an untouched model on a GPU, compiled in several ways.

    python examples/measure_step.py [--help]

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
    liger-kernel    a model patched by Liger-Kernel, eager; only if it is installed

Needs transformers beside liger_ops. On a machine without a GPU nothing is timed: the losses of a
small model are compared, and the exit status is 2.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from liger_ops.bench.step_models import BATCHES, TEXT, Batch, Made, text_model

# The channels of each level, and the side of the images in pixels.
UNETS = {"unet": ((320, 640, 1280), 128), "unet-tiny": ((32,), 8)}
CHANNELS_LAST = "-channels-last"
SHAPES = (*TEXT, *UNETS, *(name + CHANNELS_LAST for name in UNETS))

WAYS = ("eager", "compile", "causal", "liger", "liger-all", "enabled", "liger-graphs")
WAYS += ("flex", "fused", "fused-compile", "liger-kernel")
DEFAULT_WAYS = WAYS[:7]
LLAMAS = ("llama-3.2-1b", "tiny")
# The functions of Liger-Kernel that patch a model's file.
PATCHES = {"gemma3": "gemma3_text", "gpt-oss": "gpt_oss"} | dict.fromkeys(LLAMAS, "llama")
PATCHES |= {name: name for name in ("qwen3", "mistral", "gemma2", "llama4")}
# The shapes for a way that does not apply to all shapes.
FOR = {"causal": TEXT, "flex": TEXT, "liger-kernel": PATCHES}
WARM_UP = 4
# bfloat16 steps round in different places; measured on an H200, llama-3.2-1b: 1e-3.
LOSS_BOUND = 2e-2


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ways", nargs="*", default=DEFAULT_WAYS, metavar="WAY", help=f"of {WAYS}")
    parser.add_argument("--shape", choices=SHAPES, help="default: llama-3.2-1b, tiny on a CPU")
    parser.add_argument("--batch", choices=BATCHES, default="none", help="text: what it masks")
    parser.add_argument("--batch-size", type=int, help="default: that of the shape, 2 on a CPU")
    parser.add_argument("--sequence-length", type=int, help="the same, 32 on a CPU")
    parser.add_argument("--layers", type=int, help="text: default: those of the shape")
    parser.add_argument("--autocast", action="store_true", help="text: float32 under autocast")
    parser.add_argument("--steps", type=int, default=20, help="timed; default: %(default)s")
    parser.add_argument("--json", metavar="FILE", help="write what was measured")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    on_gpu = torch.cuda.is_available()
    options.shape = options.shape or ("llama-3.2-1b" if on_gpu else "tiny")
    rows, length = TEXT[options.shape][3] if on_gpu and options.shape in TEXT else (2, 32)
    options.batch_size = options.batch_size or (8 if on_gpu and options.shape in UNETS else rows)
    options.sequence_length = options.sequence_length or length
    if options.one:
        print(json.dumps(measure(options)))
        return 0
    if not on_gpu:
        print("no GPU: a small model's losses are compared, and nothing is timed", flush=True)
    results: dict[str, dict[str, Any]] = {}
    failed = False
    for way in options.ways:
        if options.shape not in FOR.get(way, SHAPES):
            continue
        if way == "liger-kernel" and importlib.util.find_spec("liger_kernel") is None:
            print(f"{way:14} is not installed", flush=True)
            continue
        result = results[way] = in_a_fresh_process(way, options)
        wrong = "error" in result or differs(result, results.get("eager"))
        failed |= wrong
        print(line(way, result, wrong, results.get("causal")), flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)
    return 1 if failed else 0 if on_gpu else 2


def in_a_fresh_process(way: str, options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, way, "--one"]
    for name in ("shape", "batch", "batch_size", "sequence_length", "layers", "steps"):
        if (given := getattr(options, name)) is not None:
            command += [f"--{name.replace('_', '-')}", str(given)]
    command += ["--autocast"] if options.autocast else []
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode != 0:
        lines = run.stderr.strip().splitlines() or ["no message"]
        raised = [
            line for line in lines if re.match(r"[\w.]+(Error|Exception|Failed|Unsupported)", line)
        ]
        return {"error": (raised or lines)[-1]}
    return json.loads(run.stdout.strip().splitlines()[-1])


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
    times = f"{result['warm_up_s']:5.0f} s, then {result['ms']:6.1f} ms"
    times += f" ({result['ms_20']:.1f} to {result['ms_80']:.1f})"
    share = ""
    if causal is not None and "ms" in causal:
        share = f"  {result['ms'] / causal['ms']:.3f} of causal"
    return f"{way:14} {times}, {result['gib']:5.1f} GiB{share}; {losses}"


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure one way, in this process."""
    (way,) = options.ways
    if way == "liger-kernel":
        import liger_kernel.transformers

        getattr(liger_kernel.transformers, f"apply_liger_kernel_to_{PATCHES[options.shape]}")()
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
    if way.startswith("fused"):
        import liger_ops

        liger_ops.fuse(model)
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

    started = time.perf_counter()
    result: dict[str, Any] = {"losses": [loss.item() for loss in [step() for _ in range(WARM_UP)]]}
    result["warm_up_s"] = time.perf_counter() - started
    if torch.cuda.is_available():
        result |= timed(step, options.steps)
    result["versions"] = {"torch": torch.__version__, "transformers": transformers.__version__}
    return result


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
    if way in ("eager", "fused", "liger-kernel"):
        return function
    if way == "enabled":
        import liger_ops

        liger_ops.enable()
    if way in ("compile", "causal", "enabled", "flex", "fused-compile"):
        # transformers makes its block masks outside of the graph.
        return torch.compile(function, fullgraph=way != "flex")
    options = {"rewrites": "all"} if way == "liger-all" else {}
    if way == "liger-graphs":
        return torch.compile(function, fullgraph=True, backend="liger", mode="reduce-overhead")
    return torch.compile(function, fullgraph=True, backend="liger", options=options)


def timed(step: Callable[[], Tensor], steps: int) -> dict[str, Any]:
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
    free, total = torch.cuda.mem_get_info()
    return {
        **{"ms": statistics.median(times), "ms_20": low, "ms_80": high},
        "gib": torch.cuda.max_memory_allocated() / 2**30,
        # The allocator's own peak does not include the pools of CUDA graphs.
        "held_gib": (total - free) / 2**30,
        "device": torch.cuda.get_device_name(),
    }


def unet(shape: str, rows: int, device: str) -> Made:
    channels, side = UNETS[shape.removesuffix(CHANNELS_LAST)]
    layout = torch.channels_last if shape.endswith(CHANNELS_LAST) else torch.contiguous_format
    with torch.device(device):
        model = UNet(channels).to(torch.bfloat16).to(memory_format=layout)
        images = torch.randn(rows, 4, side, side, dtype=torch.bfloat16)
    images = images.to(memory_format=layout)

    def loss_of(batch: Batch) -> Tensor:
        return F.mse_loss(model(batch["images"]).float(), batch["images"].float())

    return model, loss_of, {"images": images}


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(32, inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm2 = nn.GroupNorm(32, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.conv1(F.silu(self.norm1(x)))
        hidden = self.conv2(F.silu(self.norm2(hidden)))
        return self.skip(x) + hidden


class UNet(nn.Module):
    """Two blocks per level going down, and two on each level's concatenated result going up."""

    def __init__(self, channels: tuple[int, ...]) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, channels[0], 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        width = channels[0]
        for size in channels:
            halve = nn.Conv2d(size, size, 3, stride=2, padding=1)
            self.down.append(nn.ModuleList([Block(width, size), Block(size, size), halve]))
            width = size
        self.middle = nn.Sequential(Block(width, width), Block(width, width))
        for size in reversed(channels):
            double = nn.Conv2d(width, size, 3, padding=1)
            self.up.append(nn.ModuleList([double, Block(2 * size, size), Block(size, size)]))
            width = size
        self.norm = nn.GroupNorm(32, width)
        self.last = nn.Conv2d(width, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        results = []
        for one, two, halve in self.down:
            x = two(one(x))
            results.append(x)
            x = halve(x)
        x = self.middle(x)
        for (double, one, two), result in zip(self.up, reversed(results), strict=True):
            x = double(F.interpolate(x, scale_factor=2.0))
            x = two(one(torch.cat([x, result], 1)))
        return self.last(F.silu(self.norm(x)))


if __name__ == "__main__":
    raise SystemExit(main())
