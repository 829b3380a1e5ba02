"""A build for the kernels hub: what it contains, that it needs nothing else, and its layers."""

from __future__ import annotations

import ast
import base64
import hashlib
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import hub_checks
import hub_modules
from liger_ops.hub import __main__ as command
from liger_ops.hub import build, layers, local
from liger_ops.hub.experts import experts_forward
from liger_ops.hub.sources import modules
from sources import ROOT

# Where torch_npu, CANN's tbe or cuDNN's frontend is imported, it has been found before.
NEEDED = {"torch", "triton", "torch_npu", "tbe", "cudnn"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "liger-ops"
    assert command.main(["build", str(folder), "--repo-id", "someone/liger-ops"]) == 0
    return folder


@pytest.fixture(scope="module")
def other_version(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("other")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "__version__", "0.0.1")
        build.write(folder)
    return folder


def test_a_build_imports_torch_and_triton_alone(folder: Path) -> None:
    imported = set()
    for file in (folder / "build" / "torch-cuda").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                imported |= {name.name.partition(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add(node.module.partition(".")[0])
    assert imported - sys.stdlib_module_names <= NEEDED


def test_files_are_copies_and_have_their_digests(folder: Path) -> None:
    """Beside the namespace, and the package's `__init__.py`."""
    copies = {Path(*name.split(".")[1:]).as_posix(): file for name, file in modules().items()}
    for backend, kind in build.BACKENDS.items():
        variant = folder / "build" / f"torch-{backend}"
        metadata = json.loads((variant / "metadata.json").read_text())
        assert metadata["backend"]["type"] == kind
        files = {p.relative_to(variant).as_posix(): p.read_bytes() for p in variant.rglob("*.py")}
        digests = {
            path: base64.b64encode(hashlib.sha256(content).digest()).decode()
            for path, content in files.items()
        }
        assert metadata["digest"] == {"algorithm": "sha256", "files": digests}
        for path, content in files.items():
            if path not in ("__init__.py", "library.py"):
                name = path.removesuffix(".py").removesuffix("/__init__")
                assert content == copies[name].read_bytes(), path


def test_a_second_build_replaces_the_first_and_nothing_else(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(folder.rglob("*"))
    build.write(folder, "someone/liger-ops")
    assert sorted(folder.rglob("*")) == before
    foreign = folder.parent / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("")
    with pytest.raises(SystemExit, match="2"):
        command.main(["build", str(foreign)])
    assert "thesis.txt" in capsys.readouterr().err
    assert [path.name for path in foreign.iterdir()] == ["thesis.txt"]


def test_layers_without_liger_ops_and_beside_it(folder: Path, other_version: Path) -> None:
    """In a process of its own, which cannot import liger_ops until the end."""
    variants = [str(path / "build" / "torch-cpu") for path in (folder, other_version)]
    run = subprocess.run(
        [sys.executable, hub_checks.__file__, *variants, str(ROOT)],
        capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [*hub_modules.cases(), "side by side"]


@pytest.mark.parametrize("name", hub_modules.near_misses())
def test_a_near_miss_keeps_its_own_forward(name: str) -> None:
    case = hub_modules.near_misses()[name]
    module = hub_checks.replaced(case.module, getattr(layers, case.layer))
    with pytest.warns(UserWarning, match=f"{type(module).__name__} keeps its own forward"):
        actual = hub_checks.outcome(module, case.args)
    for a, e in zip(actual, hub_checks.outcome(case.module, case.args), strict=True):
        assert torch.equal(a, e)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module(*case.args)


@pytest.mark.parametrize("kind", [hub_modules.Norm, hub_modules.RoundedOnce])
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_roundings_are_the_modules(kind: type[nn.Module], weight_dtype: torch.dtype) -> None:
    """Bit by bit, and the dtype of the result, which may be the weight's."""
    own = kind().to(weight_dtype)
    module = hub_checks.replaced(own, layers.RMSNorm)
    x = torch.randn(64, hub_modules.HIDDEN, generator=torch.Generator().manual_seed(0)).bfloat16()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        y = module(x)
    assert torch.equal(y, own(x)) and y.dtype is own(x).dtype


def test_options_are_found_while_a_model_is_traced() -> None:
    """No number of the comparison may come from a trace that is under way, such as an export's."""
    case = hub_modules.cases()["zero-centred"]
    module = hub_checks.replaced(case.module, layers.RMSNorm)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        program = torch.export.export(module, case.args, strict=False)
    assert "liger.rms_norm.default" in {str(node.target) for node in program.graph.nodes}
    torch.testing.assert_close(program.module()(*case.args), case.module(*case.args))


def test_experts_as_a_function_of_transformers() -> None:
    experts = hub_modules.Experts()
    rows, scores = torch.randn(4, hub_modules.HIDDEN), torch.rand(4, 2)
    index = torch.tensor([[0, 1], [2, 1], [1, 0], [2, 2]])
    torch.testing.assert_close(
        experts_forward(experts, rows, index, scores), experts(rows, index, scores)
    )
    experts.has_post_expert_norm = True
    with pytest.raises(ValueError, match="no norm after each expert as that of Experts"):
        experts_forward(experts, rows, index, scores)


def test_the_card_names_every_layer(folder: Path) -> None:
    card = (folder / "CARD.md").read_text()
    assert all(f"| `{name}` |" in card for name in layers.__all__)
    assert '"someone/liger-ops"' in card


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    package = pytest.importorskip("kernels", reason="needs the package kernels, which is optional")
    # The tests simulate an NPU, for which it would ask torch_npu.
    monkeypatch.setattr(package.backends, "_get_torch_privateuse_backend_name", lambda: None)
    return package


def test_kernels_accepts_the_repository(kernels: Any, folder: Path) -> None:
    from kernels._rust import Build, Digest, DigestAlgorithm, Metadata

    assert len(Build.open(folder).general.backends) == len(build.BACKENDS)
    for variant in (folder / "build").iterdir():
        metadata = Metadata.read_from_file(variant / "metadata.json")
        metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))


def test_kernelize(kernels: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a folder, and by LOCAL_KERNELS and the name of a repository."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("LOCAL_KERNELS", f"someone/liger-ops={folder}")
    repository = kernels.LayerRepository("someone/liger-ops", layer_name="RMSNorm", revision="main")
    for mapping in (local.mapping(folder, "cpu"), {"RMSNorm": {"cpu": repository}}):
        case = hub_modules.cases()["norm"]
        named = kernels.use_kernel_forward_from_hub("RMSNorm")(type(case.module))
        module = named()
        with kernels.use_kernel_mapping(mapping, inherit_mapping=False):
            mode = kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE
            kernels.kernelize(module, mode=mode, use_fallback=False)
        assert module.forward.__module__.startswith("_liger_ops_cpu_")
        expected = hub_checks.outcome(case.module, case.args)
        hub_checks.assert_equal(hub_checks.outcome(module, case.args), expected)


def test_every_layer_passes_the_checks_of_kernels(kernels: Any, folder: Path) -> None:
    """A layer has no state, and a signature like that of the module."""
    from kernels.layer.layer import _validate_layer

    kernel = kernels.get_local_kernel(folder)
    for case in hub_modules.cases().values():
        layer = getattr(kernel.layers, case.layer)
        _validate_layer(check_cls=type(case.module), cls=layer, repo=None)


def test_a_model_of_transformers_gets_the_attention(kernels: Any, folder: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the model is transformers'")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 32, "use_cache": False}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    ids = torch.arange(24).view(2, 12)
    batch = {"input_ids": ids, "attention_mask": (ids > 3).long(), "labels": ids}
    expected = model(**batch).logits
    local.use_attention(model, folder)
    attention = transformers.AttentionInterface()[local.ATTENTION]
    assert attention.__module__.startswith("_liger_ops_cpu_")
    torch.testing.assert_close(model(**batch).logits[0, 4:], expected[0, 4:])
    model._supports_flash_attn = False
    with pytest.raises(ValueError, match="use_attention: LlamaForCausalLM does not support"):
        local.use_attention(model, folder)
