"""A function with two ops, and inner backends for `backend="liger"`."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch import Tensor, fx

from rewriting import values

ROOT = Path(__file__).parents[3]


def has_compiler() -> bool:
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception:
        return False
    return True


needs_compiler = pytest.mark.skipif(
    not has_compiler(), reason="Inductor needs a C++ compiler, and there is none"
)


@contextlib.contextmanager
def without_caches() -> Iterator[None]:
    """Disable the caches of Inductor and AOTAutograd, so that they compile each graph again."""
    with (
        inductor_config.patch(fx_graph_cache=False),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        yield


def inductor_calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Replace Inductor, and list the arguments of its calls."""
    import torch._inductor.compile_fx as compile_fx

    calls = []

    def compile_nothing(module: fx.GraphModule, example_inputs: Any, **how: Any) -> Any:
        nodes = [node.target for node in module.graph.nodes]
        calls.append({"config": how["config_patches"], "nodes": nodes})
        return module.forward

    monkeypatch.setattr(compile_fx, "compile_fx", compile_nothing)
    return calls


def model(x: Tensor, weight: Tensor) -> Tensor:
    """Compute one rms_norm and, as SiLU times a tensor, one swiglu."""
    x = F.rms_norm(x, (8,), weight, 1e-6)
    return F.silu(x * 2.0 + 1.0) * torch.tanh(x)


def inputs() -> tuple[Tensor, Tensor]:
    return values(2, 3, 8), values(8)


class Inner:
    """A backend that keeps the graphs that it gets, and runs them."""

    def __init__(self) -> None:
        self.graphs: list[fx.GraphModule] = []

    def __call__(
        self, module: fx.GraphModule, example_inputs: list[Any], **options: Any
    ) -> Callable[..., Any]:
        self.graphs.append(module)
        self.options = options
        return module.forward

    def ops(self) -> list[str]:
        """List the liger ops of the graphs."""
        targets = [str(node.target) for graph in self.graphs for node in graph.graph.nodes]
        return [name.split(".")[1] for name in targets if name.startswith("liger.")]


def run(code: str, *arguments: str, root: Path = ROOT, **environment: str) -> str:
    """Run Python code in a process of its own, which must succeed; return its output."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *arguments],
        # With -c, Python imports from the working directory first.
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
