"""The examples run on few and small batches."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers

import liger_ops
from liger_ops.bench import command_line, training

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "train_llama.py"
SMALL = ["--device", "cpu", "--compile-backend", "aot_eager", "--batch-size", "2"]
SMALL += ["--sequence-length", "32"]


@pytest.fixture(autouse=True)
def without_earlier_compilations() -> None:
    """Forget what other tests of this process compiled: Dynamo skips a code object for good where
    one of them could not compile it, and then begins with the functions that it calls."""
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up here.
    sys.modules[SCRIPT.stem] = module
    spec.loader.exec_module(module)
    return module


def test_the_demo_trains_saves_and_reports(tmp_path: Path) -> None:
    output = tmp_path / "run"
    result = subprocess.run(
        [sys.executable, SCRIPT, *SMALL, "--steps", "6", "--output", output],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    rows = [line.split(maxsplit=2) for line in result.stdout.splitlines()]
    assert ["graph", "breaks", "0"] in rows
    forward = "1 x liger.linear_cross_entropy_forward, 9 x liger.rms_norm, 4 x liger.rope"
    assert ["forward", "graph", f"{forward}, 4 x liger.swiglu"] in rows
    backward = "1 x liger.linear_cross_entropy_backward, 9 x liger.rms_norm_backward"
    backward += ", 4 x liger.rope_backward, 4 x liger.swiglu_backward"
    assert ["backward", "graph", backward] in rows
    (memory,) = (row[2] for row in rows if row[:2] == ["peak", "memory"])
    untouched, fused = (float(word) for word in memory.replace(",", "").split() if "." in word)
    assert untouched > 0 and fused > 0
    assert (output / "loss.png").read_bytes().startswith(b"\x89PNG")
    model = transformers.AutoModelForCausalLM.from_pretrained(output / "checkpoint")
    assert type(model) is transformers.LlamaForCausalLM
    assert model.config.num_hidden_layers == 4
    # Six steps of training have moved a norm's weight away from its initial ones.
    assert not torch.equal(model.model.norm.weight, torch.ones(model.config.hidden_size))


def test_the_demo_trains_the_untouched_model_by_rewriting_its_graph(
    demo: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*SMALL, "--steps", "6", "--backend", "liger", "--output", str(tmp_path)]
    assert demo.main(arguments) == 0, capsys.readouterr().err
    rows = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    (forward,) = (row[2] for row in rows if row[:2] == ["forward", "graph"])
    assert "8 x liger.fused_add_rms_norm" in forward


def test_twenty_steps_in_bfloat16_stay_within_the_bound(
    demo: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*SMALL, "--steps", "20", "--dtype", "bfloat16", "--output", str(tmp_path)]
    assert demo.main(arguments) == 0, capsys.readouterr().err


def test_the_ops_of_a_step_are_counted_again_when_the_compile_cache_is_warm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not training.inductor_works():
        pytest.skip("Inductor cannot build C++ here")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    x = torch.randn(4, 8, requires_grad=True)
    for _ in range(2):
        torch._dynamo.reset()
        # As where the op has a kernel: here Inductor would compile its definition.
        options = {"pattern_matcher": False}
        compiled = torch.compile(liger_ops.rms_norm, fullgraph=True, options=options)
        step = lambda compiled=compiled: compiled(x).sum().backward()
        step()
        assert training.ops_run(step) == Counter(rms_norm=1, rms_norm_backward=1)


def test_the_demo_fails_where_nothing_is_fused(
    demo: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(liger_ops, "fuse", lambda model: "nothing")
    assert demo.main([*SMALL, "--steps", "1", "--output", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert "the forward graph must hold 1 x liger.linear_cross_entropy_forward" in error
    assert "the backward graph must hold the gradient of each once" in error
    assert "the loss curves" not in error


def test_the_demo_fails_where_the_curves_differ(
    demo: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fuse = liger_ops.fuse

    def fuse_wrongly(model: torch.nn.Module) -> object:
        report = fuse(model)
        with torch.no_grad():
            model.model.norm.weight.mul_(1.1)
        return report

    monkeypatch.setattr(liger_ops, "fuse", fuse_wrongly)
    assert demo.main([*SMALL, "--steps", "2", "--output", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert "the loss curves must not differ by more than the bound" in error
    assert "graph must hold" not in error


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--steps", "0"], "'0' is not an integer of at least 1"),
        (["--seed", "x"], "'x' is not an integer of at least 0"),
        (["--text", "{folder}/missing"], "missing cannot be read: No such file or directory"),
        (["--text", "{folder}/empty"], "has 0 bytes of text"),
        (["--text", "{folder}/binary"], "has 0 bytes of text"),
        (["--output", "{folder}/empty/run"], "cannot be written: Not a directory"),
        (["--preset", "huge"], "invalid choice: 'huge'"),
        (["--device", "npu"], "--device npu: PyTorch finds none here"),
    ],
    ids=lambda value: "-".join(value).replace("{folder}/", "") if isinstance(value, list) else "",
)
def test_a_bad_argument_gets_one_sentence(
    arguments: list[str],
    sentence: str,
    demo: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "binary").write_bytes(b"text\0" * 10_000)
    with pytest.raises(SystemExit) as exited:
        demo.main([argument.format(folder=tmp_path) for argument in arguments])
    printed = capsys.readouterr()
    assert exited.value.code == 2
    assert sentence in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it times a step of billions")
@pytest.mark.parametrize(
    "arguments",
    (
        ("eager", "liger", "--batch", "padded", "--model", "llama-3.2-1b", "--layers", "1"),
        # The UNet has no attention to make causal. Its C++ would take half a minute to compile.
        ("eager", "causal", "fused", "--shape", "unet-tiny-channels-last"),
    ),
)
def test_the_steps_of_a_small_model_agree_where_there_is_no_gpu(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not training.inductor_works():
        pytest.skip("Inductor cannot build C++ here")
    # Each way runs in a process of its own.
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert command_line.main(["step", *arguments, "--steps", "2"]) == 2
    first, eager, other, *table = capsys.readouterr().out.splitlines()
    way = "fused" if "fused" in arguments else "liger"
    assert first.startswith("no GPU: ") and "tiny" in first
    assert re.match(r"eager .* ms .* GiB; losses( [\d.]+){4}$", eager)
    assert re.match(way + r" .* ms .* GiB; losses( [\d.]+){4}$", other)
    assert [row.split()[1] for row in table] == ["training", "---", "eager", way]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it times layers")
def test_experts_have_the_gradients_of_transformers() -> None:
    result = subprocess.run(
        [sys.executable, ROOT / "examples/time_experts.py", "--ways", "liger", "recompute"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("compared, error") == 12


def test_the_trainer_has_the_log_probabilities_of_the_sampler(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="the trainer is TRL's")
    example = ROOT / "examples/train_grpo.py"
    result = subprocess.run(
        [sys.executable, example, "--steps", "2", "--output", tmp_path],
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    default, invariant = result.stdout.splitlines()[-3:-1]
    assert "liger_ops.invariant(): largest difference 0, largest KL 0;" in invariant
    # Without the context the two differ, so the comparison can fail.
    assert "largest difference 0," not in default
    assert (tmp_path / "grpo.png").stat().st_size > 10000


def test_a_trainer_of_trl_takes_its_steps() -> None:
    pytest.importorskip("trl", reason="the trainer is TRL's")
    result = subprocess.run(
        [sys.executable, ROOT / "examples/time_trl.py", "dpo", "fuse", "--shape", "tiny"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    last = result.stdout.splitlines()[-1]
    # The fused model and the fused reference model agree before the first step: -log sigmoid(0).
    assert last.startswith("dpo fuse: not timed on a CPU; losses [0.69315, ")
