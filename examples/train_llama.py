"""Train a Llama twice, untouched and with liger_ops' ops compiled whole, and compare the two.

    python examples/train_llama.py [--help]

Both runs start from the same seed and use the same batches of real text: the source of Python's own
standard library, byte by byte. The first run is the unchanged transformers model, eager. The second
is `liger_ops.fuse(model)` under `torch.compile(fullgraph=True)`, or with `--backend liger` the
untouched model under `torch.compile(fullgraph=True, backend="liger")`. The exit status is 1 unless
norms, rotary embeddings, gated activations and the head with its loss run as ops, nothing breaks
the graph, the loss curves coincide and the checkpoint loads as a plain transformers model.

Needs transformers, matplotlib and tqdm beside liger_ops.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch._dynamo.utils import counters
from tqdm import tqdm

import liger_ops
from liger_ops.bench import training
from liger_ops.bench.command_line import Parser, integer
from liger_ops.bench.training import Comparison, Training, inductor_works, ops_run, reported
from liger_ops.device import MeasuredDevice

Loss = Callable[[Tensor], Tensor]

MAX_TEXT_BYTES = 8 * 2**20
# Parameters are equal and so is the arithmetic: only the fused norms' rounding may differ.
CHECKPOINT_BOUND = {torch.float32: 1e-5, torch.bfloat16: 2e-3}

SHAPE = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "vocab_size"),
)
TRAINING = ("steps", "batch_size", "sequence_length", "learning_rate")
PRESETS = {
    "tiny": ((256, 768, 4, 4, 2, 256), (100, 8, 128, 1e-3)),
    "small": ((768, 2048, 12, 12, 4, 256), (150, 16, 512, 3e-4)),
    # The real vocabulary: the bytes of the text are its first 256 tokens.
    "llama-3.2-1b": ((2048, 8192, 16, 32, 8, 128256), (100, 8, 1024, 1e-4)),
}


def main(arguments: list[str] | None = None) -> int:
    parser, options = parse_arguments(arguments)
    batches = draw_batches(options, parser)

    model = build_model(options)
    untouched = train(model, loss_of(model), batches, options.learning_rate, "untouched, eager")
    del model
    model = build_model(options)
    breaks_before = sum(counters["graph_break"].values())
    if options.backend == "fuse":
        print(liger_ops.fuse(model))
    loss = compiled(model, options.backend, options.compile_backend)
    fused = train(model, loss, batches, options.learning_rate, f"fused, {options.compile_backend}")
    if options.device == "cpu":
        # Inductor compiles the ops' definitions there, so that a profile of its code has no op.
        ops = ops_of(compiled(model, options.backend, "aot_eager"), batches[0])
        fused = dataclasses.replace(fused, ops=ops)
    graph_breaks = sum(counters["graph_break"].values()) - breaks_before

    checkpoint = options.output / "checkpoint"
    model.save_pretrained(checkpoint)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=options.dtype)
    loaded.to(options.device)
    with torch.no_grad():
        change = abs(loss_of(loaded)(batches[0]) - loss_of(model)(batches[0])).item()

    comparison = Comparison(untouched, fused)
    comparison.plot(options.output / "loss.png")
    layers, bound = model.config.num_hidden_layers, CHECKPOINT_BOUND[options.dtype]
    # The graph rewrites also see the sums before the norms.
    added = 2 * layers if options.backend == "liger" else 0
    norms = {"rms_norm": 2 * layers + 1 - added, "fused_add_rms_norm": added}
    once = {"rope": layers, "swiglu": layers, "linear_cross_entropy_forward": 1}
    expected = +Counter(norms | once)
    checks = {
        **comparison.checks(expected, options.dtype),
        "there must be no graph break": graph_breaks == 0,
        "the loaded checkpoint must hold the model's parameters": all(
            map(torch.equal, model.state_dict().values(), loaded.state_dict().values())
        ),
        f"the loaded checkpoint's loss must be the model's within {bound:.0e}": change <= bound,
    }
    rows = {"graph breaks": graph_breaks, **comparison.rows(), "output": options.output}
    return reported(rows, checks, parser.prog)


def parse_arguments(arguments: list[str] | None) -> tuple[Parser, argparse.Namespace]:
    """Parse the arguments, and fill in all defaults."""
    parser = Parser(description=(__doc__ or "").split("\n\n")[2])
    parser.add_argument("--preset", choices=PRESETS, help="default: tiny on a CPU, else small")
    best = liger_ops.infer_device()
    parser.add_argument("--device", choices=["cpu", "cuda", "npu"], default=best)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: by the device")
    for name, least in (("--steps", 1), ("--batch-size", 1), ("--sequence-length", 2)):
        parser.add_argument(name, type=integer(least), help="default: the preset's")
    parser.add_argument("--seed", type=integer(0), default=0)
    library = Path(argparse.__file__).parent
    parser.add_argument("--text", type=Path, default=library, help="a file, or a folder of files")
    parser.add_argument("--output", type=Path, default=Path("runs/train_llama"))
    parser.add_argument("--backend", choices=["fuse", "liger"], default="fuse")
    parser.add_argument("--compile-backend", choices=["inductor", "aot_eager"])
    options = parser.parse_args(arguments)

    module = getattr(torch, options.device, None)
    if module is None or not module.is_available():
        parser.error(f"--device {options.device}: PyTorch finds none here; it does find {best}")
    on_cpu = options.device == "cpu"
    options.preset = options.preset or ("tiny" if on_cpu else "small")
    options.dtype = getattr(torch, options.dtype or ("float32" if on_cpu else "bfloat16"))
    works = not on_cpu or inductor_works()
    options.compile_backend = options.compile_backend or ("inductor" if works else "aot_eager")
    for name, value in zip(TRAINING, PRESETS[options.preset][1], strict=True):
        setattr(options, name, getattr(options, name, None) or value)
    try:
        options.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--output: {options.output} cannot be written: {error.strerror}")
    return parser, options


def draw_batches(options: argparse.Namespace, parser: Parser) -> list[Tensor]:
    """Draw a batch per step from random positions of the text. Skip files with a NUL byte."""
    path, length = options.text, options.sequence_length
    try:
        files = filter(Path.is_file, sorted(path.iterdir())) if path.is_dir() else [path]
        contents = [file.read_bytes() for file in files]
    except OSError as error:
        parser.error(f"--text {path} cannot be read: {error.strerror}")
    text = b"".join(content for content in contents if b"\0" not in content)[:MAX_TEXT_BYTES]
    if len(text) < length:
        parser.error(f"--text {path} has {len(text)} bytes of text, fewer than a sequence")
    size = (options.steps, options.batch_size, length)
    return list(training.drawn(text, size, options.seed, options.device))


def build_model(options: argparse.Namespace) -> Any:
    """Build the model with random weights from the seed."""
    torch.manual_seed(options.seed)
    shape = dict(zip(SHAPE, PRESETS[options.preset][0], strict=True))
    config = transformers.LlamaConfig(
        **shape, max_position_embeddings=options.sequence_length, tie_word_embeddings=True
    )
    # The dtype is set here, because .to(dtype) would round the rotary frequencies too.
    with torch.device(options.device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=options.dtype)


def loss_of(model: Callable[..., Any]) -> Loss:
    return lambda batch: model(input_ids=batch, labels=batch, use_cache=False).loss


def compiled(model: Any, entry_point: str, backend: str) -> Loss:
    """Compile the loss of a model without a graph break: a fused model's by `backend`, or an
    untouched model's by the backend `liger`, which rewrites it and passes it on to `backend`."""
    if entry_point == "fuse":
        return loss_of(torch.compile(model, fullgraph=True, backend=backend))
    rewrites: Any = {"inner_backend": backend, "rewrites": "all"}
    # The logits are not returned, so that head and loss can become one op.
    return torch.compile(loss_of(model), fullgraph=True, backend="liger", options=rewrites)


def ops_of(loss: Loss, batch: Tensor) -> Counter[str]:
    """Return the liger ops that a step runs."""
    for _ in range(2):
        # The first step compiles.
        ops = ops_run(lambda: loss(batch).backward())
    return ops


def train(model: Any, loss_of: Loss, batches: list[Tensor], rate: float, label: str) -> Training:
    shown = tqdm(batches, desc=label, unit="step")
    losses, milliseconds = training.train(model, loss_of, shown, len(batches), rate)
    device = MeasuredDevice(batches[0].device.type)
    alone = lambda: loss_of(batches[-1]).backward()
    peak = device.peak_bytes(alone)
    ops = ops_run(alone)
    model.zero_grad()
    return Training(torch.tensor(losses), milliseconds, ops, peak)


if __name__ == "__main__":
    raise SystemExit(main())
