"""Train a Llama twice, untouched and with liger_ops' ops compiled whole, and compare the two.

    python examples/train_llama.py [--help]

Both runs start from the same seed and see the same batches of real text: the source of Python's own
standard library, byte by byte. The first is the transformers model as it comes, eager. The second
is `liger_ops.fuse(model)` under `torch.compile(fullgraph=True)`, or with `--backend liger` the
untouched model under `torch.compile(fullgraph=True, backend="liger")`: norms, rotary embedding,
gated activation, and the head with its loss. The exit status is 1 unless each of them is an op of
the compiled graphs, nothing broke the graph, the loss curves coincide and the checkpoint loads as a
plain transformers model. Bad arguments end in one sentence and status 2.

Needs transformers, matplotlib and tqdm beside liger_ops.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import sysconfig
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import matplotlib.figure
import torch
import transformers
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from tqdm import tqdm

import liger_ops

BYTES = 256
MAX_TEXT_BYTES = 8 * 2**20
PROMPT = b"def __init__(self, "

# The largest difference between the two loss curves that passes, up to step EARLY_STEPS and after.
# Training magnifies a difference in rounding. Measured, tiny: float32 on a CPU 1e-6 to step 100 and
# 1e-3 to step 200 at a constant rate; bfloat16 on an H200 1e-2 and 2e-2. llama-3.2-1b there: 2e-2.
EARLY_STEPS = 100
LOSS_BOUND = {torch.float32: (1e-4, 5e-2), torch.bfloat16: (5e-2, 2e-1)}
# Equal parameters under the same arithmetic: the fused norms' rounding is all that may differ.
CHECKPOINT_BOUND = {torch.float32: 1e-5, torch.bfloat16: 2e-3}


@dataclass(frozen=True)
class Preset:
    """A model's shape, and how it trains."""

    shape: dict[str, int]
    steps: int
    batch_size: int
    sequence_length: int
    learning_rate: float


PRESETS = {
    "tiny": Preset(
        {
            "hidden_size": 256,
            "intermediate_size": 768,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": BYTES,
        },
        steps=100,
        batch_size=8,
        sequence_length=128,
        learning_rate=1e-3,
    ),
    "small": Preset(
        {
            "hidden_size": 768,
            "intermediate_size": 2048,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "vocab_size": BYTES,
        },
        steps=150,
        batch_size=16,
        sequence_length=512,
        learning_rate=3e-4,
    ),
    "llama-3.2-1b": Preset(
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            # The real one. The text's bytes are the first of its tokens.
            "vocab_size": 128256,
        },
        steps=100,
        batch_size=8,
        sequence_length=1024,
        learning_rate=1e-4,
    ),
}


@dataclass(frozen=True)
class Settings:
    """The arguments, with everything that was left open decided."""

    device: str
    dtype: torch.dtype
    rewrites: bool
    backend: str
    backend_reason: str
    preset_name: str
    preset: Preset
    seed: int


@dataclass(frozen=True)
class Run:
    """What a training run measured; the first step, which compiles, and the last do not count as
    steps in time.

    peak_bytes is what the last step held at most beside what was there before it: activations and
    gradients, without parameters and the optimizer's state.
    """

    losses: Tensor
    first_step_seconds: float
    step_seconds: float | None
    peak_bytes: int


class UsageError(Exception):
    """An argument that cannot be used, in one sentence."""


@contextmanager
def silent_stderr() -> Iterator[None]:
    """Nothing on the process's standard error, where PyTorch's profiler announces itself."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


class PeakMemory:
    """The most bytes of tensors that a block of code holds beside what was there before it."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.bytes = 0
        self.before = 0
        self.profiler = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        )

    def __enter__(self) -> None:
        if self.device == "cpu":
            with silent_stderr():
                self.profiler.__enter__()
        else:
            synchronize(self.device)
            module = getattr(torch, self.device)
            module.reset_peak_memory_stats()
            self.before = module.memory_allocated()

    def __exit__(self, *exception: Any) -> None:
        if self.device != "cpu":
            self.bytes = getattr(torch, self.device).max_memory_allocated() - self.before
            return
        with silent_stderr():
            self.profiler.__exit__(*exception)
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder, "trace.json")
            self.profiler.export_chrome_trace(str(trace))
            events = json.loads(trace.read_text(errors="replace"))["traceEvents"]
        events = [event for event in events if event.get("name") == "[memory]"]
        held = 0
        for event in sorted(events, key=lambda event: event["ts"]):
            held += event["args"]["Bytes"]
            self.bytes = max(self.bytes, held)


class GraphRecorder:
    """A backend of torch.compile that counts the liger ops in every graph that it compiles.

    AOTAutograd hands it each forward and each backward graph, and code is generated from these.
    With `rewrites`, all those of the backend "liger" are made first.
    """

    def __init__(self, backend: str, rewrites: bool = False) -> None:
        self.backend, self.rewrites = backend, rewrites
        self.forward: Counter[str] = Counter()
        self.backward: Counter[str] = Counter()

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        if self.rewrites:
            options = {"inner_backend": self._compile, "rewrites": "all"}
            return liger_ops.backend(graph, inputs, options=options)
        return self._compile(graph, inputs)

    def _compile(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        if self.backend == "inductor":
            # A hit in AOTAutograd's cache would pass by the recorder. Inductor's cache stays on.
            with functorch_config.patch(enable_autograd_cache=False):
                return compile_fx(graph, inputs, inner_compile=self._generate_code)
        interpret = aot_autograd(
            fw_compiler=lambda graph, _: make_boxed_func(self._count(graph, self.forward)),
            bw_compiler=lambda graph, _: make_boxed_func(self._count(graph, self.backward)),
        )
        return interpret(graph, inputs)

    def _generate_code(self, graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        self._count(graph, self.backward if options.get("is_backward") else self.forward)
        return compile_fx_inner(graph, inputs, **options)

    @staticmethod
    def _count(graph: torch.fx.GraphModule, counts: Counter[str]) -> torch.fx.GraphModule:
        for node in graph.graph.nodes:
            if getattr(node.target, "namespace", None) == liger_ops.library.NAMESPACE:
                counts[node.target.name().partition("::")[2]] += 1
        return graph


def main(arguments: list[str] | None = None) -> int:
    started = time.perf_counter()
    parser = make_parser()
    options = parser.parse_args(arguments)
    try:
        settings = decide(options)
        text, text_name = load_text(options.text, settings.preset)
        checkpoint = prepare_folder(options.output / "checkpoint")
    except UsageError as error:
        parser.error(str(error))
    transformers.utils.logging.disable_progress_bar()
    preset, device = settings.preset, settings.device
    split = len(text) - preset.batch_size * preset.sequence_length
    held_out = text[split:].view(preset.batch_size, -1).long().to(device)

    print(f"Training the {settings.preset_name} Llama twice on {text_name}.", flush=True)
    if settings.backend_reason:
        print(settings.backend_reason, flush=True)
    try:
        model = build_model(settings)
        batches = draw_batches(text[:split], settings)
        untouched = train(model, loss_of(model), batches, settings, "untouched, eager")
        del model

        model = build_model(settings)
        recorder = GraphRecorder(settings.backend, settings.rewrites)
        if settings.rewrites:
            report = "nothing: the graph is rewritten"
            # The logits are not returned: the head and its loss can be one.
            compiled = torch.compile(loss_of(model), fullgraph=True, backend=recorder)
        else:
            report = str(liger_ops.fuse(model))
            compiled = loss_of(torch.compile(model, fullgraph=True, backend=recorder))
        batches = draw_batches(text[:split], settings)
        breaks_before = sum(counters["graph_break"].values())
        fused = train(model, compiled, batches, settings, f"fused, {settings.backend}")
        graph_breaks = sum(counters["graph_break"].values()) - breaks_before
    except torch.OutOfMemoryError:
        advice = "a smaller --preset, --batch-size or --sequence-length needs less"
        print(f"{parser.prog}: {device} ran out of memory; {advice}", file=sys.stderr)
        return 1

    model.save_pretrained(checkpoint)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=settings.dtype)
    loaded.to(device)
    trained, stored = model.state_dict(), loaded.state_dict()
    trained_loss, loaded_loss = evaluate(model, held_out), evaluate(loaded, held_out)

    difference = (untouched.losses - fused.losses).abs()
    bounds = loss_bounds(settings)
    picture = options.output / "loss.png"
    plot(untouched, fused, settings, picture)

    config = model.config
    parameters = sum(parameter.numel() for parameter in model.parameters())
    ops = {
        name: liger_ops.library.implementation(liger_ops.library.OPS[name], device)
        for name in sorted({*recorder.forward, *recorder.backward})
    }
    summary = {
        "device": f"{device_name(device)}, {settings.dtype}, torch {torch.__version__}",
        "model": f"{settings.preset_name}: {config.num_hidden_layers} layers, hidden size"
        f" {config.hidden_size}, {parameters / 1e6:.1f} M parameters",
        "data": f"{text_name} ({len(text) / 1e6:.1f} MB), {preset.steps} steps of"
        f" {preset.batch_size} x {preset.sequence_length} bytes",
        "fuse": report,
        "implementation": align(ops) or "no op ran",
        "graph breaks": str(graph_breaks),
        "forward graph": describe_counts(recorder.forward),
        "backward graph": describe_counts(recorder.backward),
        "untouched": f"eager: {describe_run(untouched, settings)}",
        "fused": f"{settings.backend}: {describe_run(fused, settings)}",
        "peak memory": describe_memory(untouched, fused),
        "difference": describe_difference(difference, bounds),
        "checkpoint": f"{checkpoint}, held-out loss {loaded_loss:.4f} (before: {trained_loss:.4f})",
        "curves": str(picture),
        "continuation": sample(loaded, settings),
        "total time": f"{time.perf_counter() - started:.0f} s",
    }
    print("\n" + align(summary))

    expected = expected_ops(config.num_hidden_layers, settings.rewrites)
    checkpoint_bound = CHECKPOINT_BOUND[settings.dtype]
    checks = {
        f"the forward graph must hold {describe_counts(expected)} and no other liger op": (
            recorder.forward == expected
        ),
        "the backward graph must hold the gradient of each once and no other liger op": (
            recorder.backward == gradients_of(expected)
        ),
        "there must be no graph break": graph_breaks == 0,
        "the loss curves must not differ by more than the bound": bool(
            (difference <= bounds).all()
        ),
        "the loaded checkpoint must hold the model's parameters": (
            trained.keys() == stored.keys()
            and all(torch.equal(trained[name], stored[name]) for name in trained)
        ),
        f"the loaded checkpoint's loss must be the model's within {checkpoint_bound:.0e}": (
            abs(loaded_loss - trained_loss) <= checkpoint_bound
        ),
    }
    failures = [sentence for sentence, passed in checks.items() if not passed]
    for sentence in failures:
        print(f"{parser.prog}: {sentence}", file=sys.stderr)
    return 1 if failures else 0


def expected_ops(layers: int, rewrites: bool) -> Counter[str]:
    """The ops of a Llama's forward graph. The rewrites see the sums before the norms too."""
    norms = Counter(rms_norm=1, fused_add_rms_norm=2 * layers)
    if not rewrites:
        norms = Counter(rms_norm=2 * layers + 1)
    return norms + Counter(rope=layers, swiglu=layers, linear_cross_entropy_forward=1)


def loss_of(model: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
    return lambda batch: model(input_ids=batch, labels=batch, use_cache=False).loss


def gradients_of(ops: Counter[str]) -> Counter[str]:
    return Counter({f"{op.removesuffix('_forward')}_backward": count for op, count in ops.items()})


def make_parser() -> argparse.ArgumentParser:
    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            self.exit(2, f"{self.prog}: {message}\n")

    introduction = (__doc__ or "").split("\n\n")
    parser = Parser(description=f"{introduction[0]} {introduction[2]}")
    parser.add_argument("--preset", choices=PRESETS, help="default: tiny on a CPU, else small")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda", "npu"], default="auto")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], help="default: float32 on a CPU, else bfloat16"
    )
    parser.add_argument("--steps", type=integer(1), help="default: the preset's")
    parser.add_argument("--batch-size", type=integer(1), help="default: the preset's")
    parser.add_argument("--sequence-length", type=integer(2), help="default: the preset's")
    parser.add_argument("--seed", type=integer(0), default=0, help="default: %(default)s")
    parser.add_argument(
        "--text",
        type=Path,
        metavar="PATH",
        help="a file, or a folder whose text files are read; default: Python's standard library",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        default=Path("runs/train_llama"),
        help="where the checkpoint and the picture go; default: %(default)s",
    )
    parser.add_argument(
        "--backend",
        choices=["fuse", "liger"],
        default="fuse",
        help="how the ops get into the model: liger_ops.fuse, or rewrites of its compiled graph",
    )
    parser.add_argument(
        "--compile-backend",
        choices=["auto", "inductor", "aot_eager"],
        default="auto",
        help="auto: inductor, or aot_eager on a CPU without what Inductor needs to build C++",
    )
    return parser


def integer(least: int) -> Callable[[str], int]:
    """An argument type: an integer of at least `least` that fits 32 bits."""

    def convert(value: str) -> int:
        try:
            number = int(value)
        except ValueError:
            number = least - 1
        if not least <= number < 2**31:
            raise argparse.ArgumentTypeError(f"{value!r} is not an integer of at least {least}")
        return number

    return convert


def decide(options: argparse.Namespace) -> Settings:
    """Turn what was asked for into what this machine can do, or raise UsageError."""
    device = best = liger_ops.infer_device()
    if options.device != "auto":
        device = options.device
        module = getattr(torch, device, None)
        if module is None or not module.is_available():
            raise UsageError(f"--device {device}: PyTorch finds none here; it does find {best}")
    backend, reason = options.compile_backend, ""
    if backend == "auto":
        missing = missing_for_inductor() if device == "cpu" else ""
        backend = "aot_eager" if missing else "inductor"
        reason = f"Inductor cannot work here: {missing}. Using aot_eager." if missing else ""
    preset_name = options.preset or ("tiny" if device == "cpu" else "small")
    preset = PRESETS[preset_name]
    preset = replace(
        preset,
        steps=options.steps or preset.steps,
        batch_size=options.batch_size or preset.batch_size,
        sequence_length=options.sequence_length or preset.sequence_length,
    )
    name = options.dtype or ("float32" if device == "cpu" else "bfloat16")
    dtype = getattr(torch, name)
    rewrites = options.backend == "liger"
    return Settings(device, dtype, rewrites, backend, reason, preset_name, preset, options.seed)


def missing_for_inductor() -> str:
    """What Inductor lacks to build C++ for a CPU, as it looks for it; "" when nothing."""
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        return f"the C++ compiler {compiler} is not installed"
    header = Path(sysconfig.get_path("include"), "Python.h")
    return "" if header.exists() else f"Python's header {header} is not installed"


def prepare_folder(path: Path) -> Path:
    """The folder, which is made where it is missing and can be written."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise UsageError(f"--output: {path} cannot be written: {error.strerror}") from None
    return path


def load_text(path: Path | None, preset: Preset) -> tuple[Tensor, str]:
    """The text's bytes, as many as MAX_TEXT_BYTES, and what to call it."""
    name, suffix = str(path), ""
    if path is None:
        path, suffix = Path(sysconfig.get_paths()["stdlib"]), ".py"
        name = "the source of Python's standard library"
    try:
        files = [path] if path.is_file() else walk(path, suffix)
        text = b""
        for file in files:
            with file.open("rb") as opened:
                content = opened.read(MAX_TEXT_BYTES - len(text))
            # As git and grep tell text from binary.
            text += b"" if b"\0" in content else content
            if len(text) == MAX_TEXT_BYTES:
                break
    except OSError as error:
        raise UsageError(f"--text {name} cannot be read: {error.strerror}") from None
    needed = (preset.batch_size + 1) * preset.sequence_length
    if len(text) < needed:
        raise UsageError(
            f"--text {name} has {len(text)} bytes of text, and batches of {preset.batch_size} x"
            f" {preset.sequence_length} with one held out need {needed}"
        )
    return torch.frombuffer(bytearray(text), dtype=torch.uint8), name


def walk(folder: Path, suffix: str) -> Iterator[Path]:
    """The folder's files in sorted order, without hidden ones and installed packages."""
    skipped = {"__pycache__", "site-packages", "dist-packages"}
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name in skipped:
            continue
        if path.is_file() and path.name.endswith(suffix):
            yield path
        elif path.is_dir() and not path.is_symlink():
            yield from walk(path, suffix)


def draw_batches(text: Tensor, settings: Settings) -> Iterator[Tensor]:
    """As many batches as there are steps, from random places of the text; all of one shape."""
    preset = settings.preset
    generator = torch.Generator().manual_seed(settings.seed)
    window = torch.arange(preset.sequence_length)
    places = len(text) - preset.sequence_length + 1
    for _ in range(preset.steps):
        starts = torch.randint(places, (preset.batch_size, 1), generator=generator)
        yield text[starts + window].long().to(settings.device)


def build_model(settings: Settings) -> Any:
    """The model, with the random weights of the seed."""
    torch.manual_seed(settings.seed)
    config = transformers.LlamaConfig(
        max_position_embeddings=settings.preset.sequence_length,
        tie_word_embeddings=True,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
        **settings.preset.shape,
    )
    # Not .to(dtype), which would round the rotary frequencies too.
    with torch.device(settings.device):
        return transformers.AutoModelForCausalLM.from_config(
            config, dtype=settings.dtype, attn_implementation="sdpa"
        )


def train(
    model: torch.nn.Module,
    loss_of_batch: Callable[[Tensor], Tensor],
    batches: Iterator[Tensor],
    settings: Settings,
    label: str,
) -> Run:
    """Train `model` by `loss_of_batch`, with AdamW and a rate that rises, then falls to 0.

    The optimizer keeps float32 parameters: in bfloat16 a norm's weight, which starts at 1, would
    lose every update below 1/256. Where the model is float32 they are the model's own memory.
    """
    preset = settings.preset
    parameters = list(model.parameters())
    masters = [parameter.detach().float() for parameter in parameters]
    optimizer = torch.optim.AdamW(masters, lr=preset.learning_rate, betas=(0.9, 0.95))
    warmup = min(10, preset.steps)
    tokens = preset.batch_size * preset.sequence_length
    losses: list[Tensor] = []
    peak_memory = PeakMemory(settings.device)
    started = shown = steady = last = time.perf_counter()
    first_step_seconds = 0.0
    bar = tqdm(
        batches, desc=label, total=preset.steps, unit="step", dynamic_ncols=True, mininterval=0.5
    )
    bar.set_postfix_str("first step")
    for step, batch in enumerate(bar):
        rate = preset.learning_rate * min((step + 1) / warmup, 1) * (1 - step / preset.steps)
        optimizer.param_groups[0]["lr"] = rate
        is_last = step == preset.steps - 1
        if is_last:
            synchronize(settings.device)
            last = time.perf_counter()
        with peak_memory if is_last else nullcontext():
            loss = loss_of_batch(batch)
            loss.backward()
        for parameter, master in zip(parameters, masters, strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(parameters, masters, strict=True):
                parameter.copy_(master)
        losses.append(loss.detach().float())
        now = time.perf_counter()
        if step == 0:
            synchronize(settings.device)
            first_step_seconds = time.perf_counter() - started
            steady = time.perf_counter()
        elif now - shown > 0.5:
            # item() waits for the device, so that the speed is that of finished steps.
            value = losses[-1].item()
            speed = tokens * step / (time.perf_counter() - steady)
            bar.set_postfix_str(f"loss {value:.3f}, {speed:,.0f} tokens/s", refresh=False)
            shown = now
    step_seconds = (last - steady) / (preset.steps - 2) if preset.steps > 2 else None
    return Run(torch.stack(losses).cpu(), first_step_seconds, step_seconds, peak_memory.bytes)


def synchronize(device: str) -> None:
    if device != "cpu":
        getattr(torch, device).synchronize()


@torch.no_grad()
def evaluate(model: Any, batch: Tensor) -> float:
    return model(input_ids=batch, labels=batch, use_cache=False).loss.item()


def sample(model: Any, settings: Settings) -> str:
    """What the model writes after the prompt, with ? for what a terminal should not print."""
    torch.manual_seed(settings.seed)
    prompt = torch.tensor([list(PROMPT)], device=settings.device)
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=100,
        do_sample=True,
        temperature=0.7,
        use_cache=True,
    )
    # A token beyond the bytes has no character either.
    written = bytes(min(token, BYTES - 1) for token in output[0].tolist())
    text = written.decode("ascii", errors="replace").replace("\ufffd", "?")
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def plot(untouched: Run, fused: Run, settings: Settings, path: Path) -> None:
    """Both loss curves, and below them their difference."""
    steps = range(1, len(untouched.losses) + 1)
    figure = matplotlib.figure.Figure(figsize=(8, 6), layout="constrained")
    curves, differences = figure.subplots(2, sharex=True, height_ratios=(2, 1))
    curves.plot(steps, untouched.losses, color="tab:orange", linewidth=5, alpha=0.5)
    curves.plot(steps, fused.losses, color="tab:blue", linewidth=1.2)
    curves.legend(["untouched, eager", f"liger_ops fused, {settings.backend}"])
    curves.set_ylabel("loss (nats per byte)")
    curves.set_title(f"{settings.preset_name} Llama on {device_name(settings.device)}")
    # A logarithmic axis leaves out the steps where the two are equal to the last bit.
    difference = (untouched.losses - fused.losses).abs()
    differences.plot(steps, difference, ".", color="tab:green", label="where not 0")
    differences.plot(steps, loss_bounds(settings), color="tab:red", linestyle="--", label="bound")
    differences.set_yscale("log", nonpositive="mask")
    differences.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False)
    differences.set_ylabel("|difference|")
    differences.set_xlabel("step")
    for axes in (curves, differences):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def device_name(device: str) -> str:
    if device == "cpu":
        threads = torch.get_num_threads()
        return f"cpu ({threads} thread{'s' * (threads != 1)})"
    return f"{device} ({getattr(torch, device).get_device_name()})"


def loss_bounds(settings: Settings) -> Tensor:
    """The bound of every step."""
    early, late = LOSS_BOUND[settings.dtype]
    steps = torch.arange(1, settings.preset.steps + 1)
    return torch.where(steps <= EARLY_STEPS, early, late)


def describe_difference(difference: Tensor, bounds: Tensor) -> str:
    """The largest difference of the steps under each bound."""
    parts = []
    for first, last in ((1, EARLY_STEPS), (EARLY_STEPS + 1, len(difference))):
        steps = slice(first - 1, last)
        if first <= len(difference):
            parts.append(
                f"at most {difference[steps].max():.1e} in steps {first} to"
                f" {min(last, len(difference))} (bound {bounds[first - 1]:.0e})"
            )
    return "\n".join(parts)


def describe_counts(counts: Counter[str]) -> str:
    parts = [f"{count} x liger.{op}" for op, count in sorted(counts.items())]
    return ", ".join(parts) or "no liger op"


def describe_run(run: Run, settings: Settings) -> str:
    speed = ""
    if run.step_seconds is not None and settings.device != "cpu":
        tokens = settings.preset.batch_size * settings.preset.sequence_length
        per_second = tokens / run.step_seconds
        speed = f"{1e3 * run.step_seconds:.1f} ms a step, {per_second:,.0f} tokens/s, "
    return (
        f"loss {run.losses[0]:.3f} to {run.losses[-1]:.3f}, {speed}"
        f"first step {run.first_step_seconds:.1f} s"
    )


def describe_memory(untouched: Run, fused: Run) -> str:
    megabytes = (f"{run.peak_bytes / 2**20:,.1f} MiB" for run in (untouched, fused))
    return "of a step, beside parameters and optimizer: {} untouched, {} fused".format(*megabytes)


def align(rows: dict[str, str]) -> str:
    """Two columns; the further lines of a value stand below its first."""
    width = max((len(name) for name in rows), default=0) + 2
    indent = " " * width
    return "\n".join(
        name.ljust(width) + textwrap.indent(value, indent).removeprefix(indent)
        for name, value in rows.items()
    )


if __name__ == "__main__":
    sys.exit(main())
