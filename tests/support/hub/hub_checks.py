"""Load two versions of a build for the kernels hub where liger_ops cannot be imported, compare each
layer with a module's own code, and then import liger_ops beside them.

    python tests/support/hub/hub_checks.py DIR DIR CHECKOUT

Only torch and triton are imported, beside hub_modules.py. It raises if a layer is wrong.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import hub_modules

# What else may be installed, and must not be needed.
HIDDEN = ("liger_ops", "transformers", "kernels", "einops")


# Dynamo of older versions cannot trace the layers, which say so.
TRACES = torch.__version__ >= "2.13"


class Hidden:
    """A finder that finds none of HIDDEN."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"{name} is hidden", name=name)


def load(variant: Path) -> ModuleType:
    """Import a variant as the package `kernels` does: by the id in its metadata."""
    name = json.loads((variant / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def replaced(module: nn.Module, layer: Any) -> nn.Module:
    """Return a copy of a module with the layer's forward, as `kernels.kernelize` puts it there."""
    module = copy.deepcopy(module)
    module.forward = MethodType(layer.forward, module)  # type: ignore[method-assign]
    return module


def outcome(module: nn.Module, args: tuple[Any, ...], compiled: Any = None) -> list[Tensor]:
    """Return the results, and the gradients of arguments and parameters."""
    module.zero_grad()
    args = pytree.tree_map_only(Tensor, lambda x: x.clone(), args)
    floats = [x for x in args if isinstance(x, Tensor) and x.is_floating_point()]
    for x in floats:
        x.requires_grad_()
    results = pytree.tree_leaves((module if compiled is None else compiled)(*args))
    sum((y * torch.linspace(1, 2, y.numel()).view(y.shape)).sum() for y in results).backward()
    return [*results, *(x.grad for x in (*floats, *module.parameters()))]


def assert_equal(actual: list[Tensor], expected: list[Tensor]) -> None:
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-5 * e.abs().max().item())


def check(kernel: ModuleType, case: hub_modules.Case) -> None:
    """Compare a layer, eager and compiled, with the module's own code."""
    layer = getattr(kernel.layers, case.layer)
    assert layer.can_torch_compile is TRACES and layer.has_backward
    expected = outcome(case.module, case.args)
    module = replaced(case.module, layer)
    assert_equal(outcome(module, case.args), expected)
    if not TRACES:
        return
    targets = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    assert_equal(outcome(module, case.args, compiled), expected)
    namespace = sys.modules[f"{kernel.__name__}.library"].NAMESPACE
    assert f"{namespace}.{case.op}.default" in targets, (case.layer, targets)


def main(first: str, second: str, checkout: str) -> None:
    sys.path[:] = [folder for folder in sys.path if folder not in ("", checkout)]
    sys.meta_path.insert(0, Hidden)  # type: ignore[arg-type]
    torch.set_num_threads(1)
    kernel, other = load(Path(first)), load(Path(second))
    assert kernel.__name__ != other.__name__
    for name, case in hub_modules.cases().items():
        check(kernel, case)
        print(name)
    x = torch.randn(3, 8)
    assert torch.equal(kernel.rms_norm(x), other.rms_norm(x))
    for device in ("cuda", "npu"):
        importlib.import_module(f"{kernel.__name__}.lowering.{device}")
    library = sys.modules[f"{kernel.__name__}.library"]
    for op in library.OPS.values():
        assert op.fake is not None, op.name
        for device in library.DEVICES:
            assert op.kernels[device].__module__.startswith(f"{kernel.__name__}.lowering."), op.name
    assert not {name.partition(".")[0] for name in sys.modules}.intersection(HIDDEN)

    sys.meta_path.remove(Hidden)  # type: ignore[arg-type]
    sys.path.insert(0, checkout)
    import liger_ops

    assert PathFinder.find_spec("liger_ops") is not None
    assert torch.equal(kernel.rms_norm(x), liger_ops.rms_norm(x))
    print("side by side")


if __name__ == "__main__":
    main(*sys.argv[1:])
