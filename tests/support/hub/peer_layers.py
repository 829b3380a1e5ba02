"""Train models with the layers of Liger-Kernel's repository for the kernels hub.

Its source is the folder liger-kernels of https://github.com/huggingface/kernels-community, a
repository of Python and Triton. Nothing of it is here: it is laid out in a folder and loaded from
there, as a user of the hub loads it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import subprocess
import tomllib
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

from hub_training import EQUAL, FAILS, SAME_ERROR, WRONG, outcome
from interpreted_launches import interpreted_launches
from liger_ops.hub import local
from training_steps import CannotTrain, Model, one_line, own_results

BACKEND = "aot_eager"
KEPT, NONE = "own forward kept", "none"
NAMED = {"RMSNorm": "LigerRMSNorm", "rotary_pos_emb": "liger_rotary_pos_emb_layer"}
MLPS = {"SwiGLUMLP": "LigerSwiGLUMLP", "GeGLUMLP": "LigerGEGLUMLP"}
TILED = {"SwiGLUMLP": "LigerTiledSwiGLUMLP", "GeGLUMLP": "LigerTiledGEGLUMLP"}
LOSS = {"ForCausalLMLoss": "LigerForCausalLMLossLayer"}


class Way(NamedTuple):
    """A column: whether the model is compiled, the layer of each name, and whether layers that do
    not say so are taken for ones that can be compiled."""

    compiled: bool
    layers: dict[str, str]
    forced: bool = False


NORMS = {"RMSNorm": NAMED["RMSNorm"]}
WAYS = {
    "norms, eager": Way(False, NORMS),
    "rotary, eager": Way(False, {"rotary_pos_emb": NAMED["rotary_pos_emb"]}),
    "tiled MLPs, eager": Way(False, TILED),
    "norms and rotary, compiled": Way(True, NAMED),
    "norms, compiled by force": Way(True, NORMS, forced=True),
    "MLPs, compiled": Way(True, MLPS),
    "tiled MLPs, compiled": Way(True, TILED),
    "loss, compiled": Way(True, LOSS),
}
# The name of an activation -> that of the gated MLP that it makes.
ACTIVATIONS = {"SiLU": "SwiGLUMLP", "GeluTanh": "GeGLUMLP"}
HEADING = "\n## With the layers of Liger-Kernel's repository\n"

INTRODUCTION = """
Written by `python tests/support/hub_report.py --peer FOLDER`, where FOLDER is `liger-kernels` of a
clone of [kernels-community](https://github.com/huggingface/kernels-community): version {version},
{commit}. torch {torch}, transformers {transformers}, kernels {kernels}.

The same models, batches and comparison. A column has one kind of layer, in an eager step after
`kernelize(model, mode=Mode.TRAINING)`, or compiled as above, by `backend="{backend}"`:

| column | layers |
| --- | --- |
{layers}

For `cuda` transformers maps the names of the norms, the tiled MLPs and the loss to these layers,
and `rotary_pos_emb` to none of this repository. No model asks for the MLPs and the loss by name:
the names were given for this table, those of MLPs to classes of the three projections and the
activation that the layer computes, and no more.

"{kept}" means that `kernelize` left the model's own layer, because theirs does not
say that it can be compiled, and "kept" behind a result means the same of the layer that is named.
"by force" is with `can_torch_compile` set on the layer. "{none}" means that the model has no such
layer.

The layers are Triton kernels for GPUs, and the repository has no variant for a CPU: its files were
laid out as `torch-cpu`, and Triton's interpreter ran the launches, in float32 and with the grids
that their code has for a CPU. What a GPU does with the kernels, and half precision, are not in the
table. Nothing else is the interpreter's: Dynamo traces the launches as for a GPU, PyTorch finds
what they write in the Triton IR for sm_90, and they are nodes of the graphs of AOT autograd. The
interpreter has no functions of libdevice: those of the language stand in for `rsqrt` and `tanh`.

Of {count} models:

{counts}

| model | {ways} |
| --- | {dashes} |
"""


def lay_out(source: Path, folder: Path) -> dict[str, Any]:
    """Write the source of a repository without compiled code as the hub's builder would lay it out,
    as the variant for a CPU.

    Returns:
        "version" of its build.toml, and the "commit" of its clone.
    """
    general = tomllib.loads((source / "build.toml").read_text())["general"]
    package = source / "torch-ext" / general["name"].replace("-", "_")
    variant = folder / "build" / "torch-cpu"
    shutil.copytree(package, variant)
    digest = hashlib.sha256()
    for file in sorted(variant.rglob("*.py")):
        digest.update(file.read_bytes())
    metadata = {
        "name": general["name"],
        "id": f"_{package.name}_cpu_{digest.hexdigest()[:10]}",
        "version": general["version"],
        "license": general["license"],
        "python-depends": [],
        "backend": {"type": "cpu"},
    }
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    command = ["git", "-C", str(source), "log", "-1", "--format=commit %h of %cs", "--abbrev=12"]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    return {"version": general["version"], "commit": found}


def layers_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every layer that a model asks for by name, a function of a module too, behind it."""
    for module in model.modules():
        for layer in (module, *getattr(module, "_kernel_funcs", {}).values()):
            if name := getattr(type(layer), "kernel_layer_name", None):
                yield name, layer


@contextlib.contextmanager
def named(model: Any, layers: dict[str, str]) -> Iterator[None]:
    """Give a model's MLPs and its loss the names of their layers, while within, if there are any.

    The names of MLPs are the classes': an earlier one of another layer is set aside.
    """
    from kernels import replace_kernel_forward_from_hub, use_kernel_forward_from_hub
    from transformers.loss.loss_utils import ForCausalLMLoss

    if "ForCausalLMLoss" in layers and model.loss_function is ForCausalLMLoss:
        model._loss_function = use_kernel_forward_from_hub("ForCausalLMLoss")(ForCausalLMLoss)
    kinds = {type(module): module for module in model.modules()}
    attributes = ("kernel_layer_name", "kernel_condition")
    before = {
        kind: {name: vars(kind)[name] for name in attributes if name in vars(kind)}
        for kind in kinds
        if getattr(kind, "kernel_layer_name", None) in MLPS or mlp_name(kinds[kind])
    }
    try:
        for kind, earlier in before.items():
            for attribute in earlier:
                delattr(kind, attribute)
            if name := mlp_name(kinds[kind]):
                replace_kernel_forward_from_hub(kind, name)
        yield
    finally:
        for kind, earlier in before.items():
            for attribute in attributes:
                if attribute in vars(kind):
                    delattr(kind, attribute)
            for attribute, value in earlier.items():
                setattr(kind, attribute, value)


def mlp_name(module: nn.Module) -> str | None:
    """Return the name of the layer that computes a gated MLP, or None for another module."""
    children = dict(module.named_children())
    if children.keys() != {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        return None
    activation = type(children["act_fn"])
    return ACTIVATIONS.get(getattr(activation, "kernel_layer_name", activation.__name__))


def trained(model: Model, folder: Path) -> list[str]:
    """Train a model in all ways with the layers of a repository that `lay_out` wrote, and return
    the cells of its row."""
    try:
        own = own_results(model)
    except CannotTrain as reason:
        return [f"{SAME_ERROR}: {reason}"] * len(WAYS)
    return [way_trained(model, own, folder, way) for way in WAYS.values()]


def way_trained(model: Model, own: dict[str, Tensor], folder: Path, way: Way) -> str:
    from kernels import LocalLayerRepository, Mode, kernelize, use_kernel_mapping

    repositories = {
        name: LocalLayerRepository(folder, layer_name=layer) for name, layer in way.layers.items()
    }
    mapping = {name: {"cpu": repository} for name, repository in repositories.items()}
    mode = Mode.TRAINING | Mode.TORCH_COMPILE if way.compiled else Mode.TRAINING
    says_it_compiles = [
        mock.patch.object(repository.load(), "can_torch_compile", True, create=True)
        for repository in repositories.values()
        if way.forced
    ]

    def give(made: Any) -> tuple[set[str], set[str]]:
        """Give a model the layers, and return the names that it asks for, and those it got."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(named(made, way.layers))
            stack.enter_context(use_kernel_mapping(mapping, inherit_mapping=False))
            for patch in says_it_compiles:
                stack.enter_context(patch)
            asked = [(name, layer) for name, layer in layers_of(made) if name in way.layers]
            if asked:
                kernelize(made, mode=mode, device="cpu")
        got = {name for name, layer in asked if layer.forward.__func__ is not type(layer).forward}
        return {name for name, _ in asked}, got

    made = model.build()
    try:
        asked, got = give(made)
    except Exception as error:
        return f"{FAILS}: {one_line(error)}".replace(str(folder), folder.name)
    finally:
        local.restore(made)
    if not got:
        return KEPT if asked else NONE
    with interpreted_launches():
        compiler = torch._dynamo.lookup_backend(BACKEND) if way.compiled else None
        cell = outcome(model, own, give, BACKEND, compiler)
    return f"{cell}, {' and '.join(sorted(asked - got))} kept" if asked - got else cell


def section(known: dict[str, list[str]], origin: dict[str, Any]) -> str:
    """Return the part of the document with the rows of the models.

    Args:
        known: model -> its cells.
        origin: what `lay_out` returned.
    """
    introduction = INTRODUCTION.format(
        **origin,
        torch=torch.__version__.split("+")[0],
        **{name: version(name) for name in ("transformers", "kernels")},
        backend=BACKEND,
        kept=KEPT,
        none=NONE,
        layers="\n".join(
            f"| {title} | {', '.join(f'`{layer}`' for layer in way.layers.values())} |"
            for title, way in WAYS.items()
        ),
        count=len(known),
        counts=counts(known),
        ways=" | ".join(WAYS),
        dashes=" | ".join("---" for _ in WAYS),
    )
    table = "".join(f"| {' | '.join([name, *known[name]])} |\n" for name in sorted(known))
    return HEADING + introduction + table


def counts(known: dict[str, list[str]]) -> str:
    """Return a list with the number of models of each outcome, by column."""
    words = {
        EQUAL: "equal", WRONG: "wrong", FAILS: "failed", SAME_ERROR: SAME_ERROR, KEPT: KEPT,
        NONE: "without such a layer",
    }  # fmt: skip
    lines = []
    for i, way in enumerate(WAYS):
        found = Counter(cells[i].partition(":")[0].partition(",")[0] for cells in known.values())
        listed = ", ".join(f"{found[kind]} {word}" for kind, word in words.items() if found[kind])
        lines.append(f"- {way}: {listed}.")
    return "\n".join(lines)
