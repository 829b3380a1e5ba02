"""Write a repository for the kernels hub, from this package's own files."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
from pathlib import Path
from textwrap import dedent

from .. import __version__
from ..library import NAMESPACE
from .sources import PACKAGE, modules

NAME = "liger-ops"
PYTHON_NAME = NAME.replace("-", "_")
REPOSITORY = f"kernels-community/{NAME}"
# The version of what the layers take and return, by which a user of the hub asks for a kernel.
VERSION = 1
LICENSE = "Apache-2.0"
# What a build may replace, or leave.
OWN = {"build", "torch-ext", "build.toml", "CARD.md", "LICENSE", ".git", ".gitattributes"}
# Name of a variant's folder -> the backend in its metadata.
BACKENDS = {"cpu": "cpu", "cuda": "cuda", "npu": "cann", "rocm": "rocm"}


def write(folder: Path, repository: str = REPOSITORY) -> dict[str, str]:
    """Write the repository into a folder, which is made, is empty, or has an earlier one.

    `build/torch-<backend>` has the package for each of BACKENDS: the same files, beside metadata.
    `torch-ext` has them once more, from which kernel-builder would make the same variants.

    Args:
        folder: where to write.
        repository: the repository's name on the hub, for its card and build.toml.

    Returns:
        name of a variant -> the id under which `kernels` imports it.

    Raises:
        ValueError: the folder has files and no earlier repository.
    """
    others = {path.name for path in folder.iterdir()} - OWN if folder.exists() else set()
    if others:
        raise ValueError(f"{folder} has files that no build wrote: {', '.join(sorted(others))}")
    for name in ("build", "torch-ext"):
        shutil.rmtree(folder / name, ignore_errors=True)
    files, digest = package()
    ids = {}
    for backend, kind in BACKENDS.items():
        variant = folder / "build" / f"torch-{backend}"
        ids[variant.name] = f"_{PYTHON_NAME}_{backend}_{digest}"
        _write(variant, files | {"metadata.json": _metadata(ids[variant.name], kind, files)})
    _write(folder / "torch-ext" / PYTHON_NAME, files)
    license_ = Path(__file__).parents[2] / "LICENSE"
    texts = {"build.toml": _build_toml(repository), "CARD.md": _card(repository)}
    if license_.is_file():
        texts["LICENSE"] = license_.read_text()
    _write(folder, texts)
    return ids


def package() -> tuple[dict[str, str], str]:
    """Return the files of the package, by their paths in it, and a hash of them all.

    All are copies but two: `__init__.py`, and `library.py`, whose namespace has the hash, so that
    the ops of two versions, and those of an installed liger_ops, stand side by side.
    """
    files = {}
    for name, file in modules().items():
        path = Path(*name.split(".")[1:])
        path = path / "__init__.py" if file.stem == "__init__" else path.with_suffix(".py")
        files[path.as_posix()] = file.read_text()
    files["__init__.py"] = _init()
    digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:10]
    own, renamed = (f'NAMESPACE = "{name}"' for name in (NAMESPACE, f"{PYTHON_NAME}_{digest}"))
    assert files["library.py"].count(own) == 1, "library.py: the namespace is not in one line"
    files["library.py"] = files["library.py"].replace(own, renamed)
    return files, digest


def _write(folder: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def _init() -> str:
    return dedent(f'''\
        """Fused training kernels for large language models, from {PACKAGE} {__version__}."""

        from .hub.package import *  # noqa: F403
        from .hub.package import __all__  # noqa: F401
        ''')


def _metadata(id_: str, backend: str, files: dict[str, str]) -> str:
    digests = {
        path: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for path, text in sorted(files.items())
    }
    metadata = {
        "name": NAME,
        "id": id_,
        "version": VERSION,
        "license": LICENSE,
        "python-depends": [],
        "backend": {"type": backend},
        "digest": {"algorithm": "sha256", "files": digests},
    }
    return json.dumps(metadata, indent=2) + "\n"


def _build_toml(repository: str) -> str:
    backends = ", ".join(f'"{backend}"' for backend in BACKENDS.values())
    return dedent(f"""\
        [general]
        name = "{NAME}"
        edition = 5
        version = {VERSION}
        license = "{LICENSE}"
        backends = [{backends}]
        python-depends = []

        [general.hub]
        repo-id = "{repository}"

        [torch-noarch]
        """)


def _card(repository: str) -> str:
    from . import layers

    listed = "\n".join(
        f"| `{name}` | {_first_line(getattr(layers, name))} |" for name in layers.__all__
    )
    return CARD.format(
        license=LICENSE.lower(), name=NAME, package=PACKAGE, version=__version__,
        repository=repository, kernel_version=VERSION, layers=listed,
    )  # fmt: skip


def _first_line(layer: type) -> str:
    return " ".join((layer.__doc__ or "").partition("\n\n")[0].split())


CARD = """\
---
library_name: kernels
license: {license}
tags:
- kernels
---

# {name}

Fused training kernels for large language models, from {package} {version}, in Triton for NVIDIA and
AMD GPUs and in Triton-Ascend for Ascend NPUs. On a CPU the layers run the ops' definitions in plain
PyTorch. Every layer has a backward. With torch 2.13 or later it compiles without a graph break: its
op is one node of the graph. torch 2.10 to 2.15 and, on a device, Triton are all that is imported.
On AMD GPUs and Ascend NPUs no kernel has been run.

```python
from kernels import LayerRepository, Mode, kernelize, use_kernel_mapping

names = ["RMSNorm", "rotary_pos_emb"]
mapping = {{
    name: {{"cuda": LayerRepository("{repository}", layer_name=name, version={kernel_version})}}
    for name in names
}}
with use_kernel_mapping(mapping):
    kernelize(model, mode=Mode.TRAINING | Mode.TORCH_COMPILE)
```

| layer | what it computes |
|---|---|
{layers}

`attention` and `attention_mask` are functions for transformers' `AttentionInterface` and
`AttentionMaskInterface`, for models that support FlashAttention: causal, with padding, packed
documents, windows, soft caps and sinks.

The layers have the names by which transformers looks them up, or would: `SwiGLUMLP`, `GeGLUMLP` and
`ForCausalLMLoss` are in its mapping, and no model of transformers 5.20 to 5.24 asks for them.
A layer compares its op with the module's own code on a small example before it first runs, and a
module that computes something else keeps its own forward, with a warning.
"""
