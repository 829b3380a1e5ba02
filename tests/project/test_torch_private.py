"""Each private part of PyTorch that is used is there; without it no number is wrong."""

from __future__ import annotations

import importlib
import os
import pkgutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import liger_ops
from liger_ops import torch_private
from liger_ops.torch_private import AUTOGRAD, PARTS, Lacking

Loss = Callable[[Tensor, Tensor], Tensor]


def lacks(monkeypatch: pytest.MonkeyPatch, name: str) -> Any:
    """Return the stand-in for a part that this torch lacks, in every module that uses it."""
    there, part = getattr(torch_private, name), PARTS[name]
    resolve = pkgutil.resolve_name

    def lookup(path: str) -> Any:
        if path == part.path:
            raise AttributeError(path)
        return resolve(path)

    with monkeypatch.context() as patch:
        patch.setattr(pkgutil, "resolve_name", lookup)
        patch.delitem(torch_private.__dict__, name)
        with pytest.warns(UserWarning, match=part.path.replace(":", ".")):
            instead = getattr(torch_private, name)
    for user, module in [*sys.modules.items()]:
        if user.startswith("liger_ops") and module.__dict__.get(name) is there:
            monkeypatch.setitem(module.__dict__, name, instead)
    return instead


def test_every_part_is_in_this_torch() -> None:
    # Each may be gone in the next torch. Most have a public way by now.
    assert len(PARTS) <= 47
    for name, part in PARTS.items():
        if name != "StaticCudaLauncher" or torch.version.cuda:
            pkgutil.resolve_name(part.path)


def test_a_module_that_somebody_looks_for_is_extended_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By each registration, once; a module that is not there stays one that is not found."""
    (tmp_path / "imported_late.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    extended: list[Any] = []
    for name in ("imported_late", "imported_late", "imported_never"):
        torch_private.after_import(name, extended.append)
    assert find_spec("imported_late") and not extended and find_spec("imported_never") is None
    module = importlib.import_module("imported_late")
    assert extended == [module] * 2 and importlib.reload(module) and len(extended) == 2
    del sys.modules["imported_late"]


def model(x: Tensor, weight: Tensor) -> Tensor:
    """One rms_norm and one linear_cross_entropy."""
    norm = F.rms_norm(x, (8,), weight[0], 1e-6)
    return F.cross_entropy(norm @ weight.T, torch.tensor([1, 2, -100]))


def eager(x: Tensor, weight: Tensor) -> Tensor:
    norm = liger_ops.rms_norm(x, weight[0], 1e-6)
    return liger_ops.linear_cross_entropy(norm, weight, torch.tensor([1, 2, -100]))


def compiled(x: Tensor, weight: Tensor) -> Tensor:
    torch.compiler.reset()
    options = {"inner_backend": "eager"}
    return torch.compile(model, backend="liger", options=options)(x, weight)


def in_autocast(x: Tensor, weight: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        norm = liger_ops.rms_norm(x, weight[0], 1e-6)
    return liger_ops.linear_cross_entropy(norm, weight, torch.tensor([1, 2, -100]))


def fused(x: Tensor, weight: Tensor) -> Tensor:
    norm = torch.nn.RMSNorm(8, eps=1e-6)
    block = torch.nn.Sequential(norm)
    liger_ops.fuse(block)
    rows = torch.func.functional_call(block, {"0.weight": weight[0]}, (x,))
    return F.cross_entropy(rows @ weight.T, torch.tensor([1, 2, -100]))


def gradients(loss: Loss) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(n, 8, generator=generator, requires_grad=True)  # fmt: skip
        for n in (3, 11)
    )
    value = loss(x, weight)
    return value, *torch.autograd.grad(value, (x, weight))


@pytest.mark.filterwarnings("ignore:liger_ops")
@pytest.mark.parametrize("name", [name for name in PARTS if name not in AUTOGRAD])
def test_no_number_is_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each result is right, or an error names the part."""
    monkeypatch.setenv("LIGER_OPS_STRICT", "0")
    expected = gradients(model)
    gradients(compiled)
    instead = lacks(monkeypatch, name)
    for loss in (eager, compiled, in_autocast, fused):
        try:
            found = gradients(loss)
        except RuntimeError as error:
            assert isinstance(instead, Lacking) and "liger_ops: torch" in str(error), loss
        else:
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    x, weight = torch.randn(3, 8), torch.randn(11, 8)
    found, expected = (torch.func.grad(loss, (0, 1))(x, weight) for loss in (eager, model))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    if isinstance(instead, Lacking):
        with pytest.raises(RuntimeError, match=PARTS[name].path.replace(":", ".")):
            instead()


WITHOUT_AUTOGRAD = """
import pkgutil, torch, warnings
resolve = pkgutil.resolve_name

def lookup(path):
    if path == {path!r}:
        raise AttributeError(path)
    return resolve(path)

pkgutil.resolve_name = lookup
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import liger_ops
assert any({attribute!r} in str(warning.message) for warning in caught), caught
from test_torch_private import eager, gradients, model
torch.testing.assert_close(gradients(eager), gradients(model), atol=1e-5, rtol=1e-4)
x = torch.randn(3, 8)
found = torch.func.grad(lambda weight: eager(x, weight))(torch.ones(11, 8))
expected = torch.func.grad(lambda weight: model(x, weight))(torch.ones(11, 8))
torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
print("right")
"""


@pytest.mark.parametrize("name", ["any_requires_grad", "BelowAutograd"])
def test_without_the_autograd_kernels(name: str) -> None:
    """They are registered on import, together: one part that is lacking leaves PyTorch's own."""
    path = PARTS[name].path
    program = WITHOUT_AUTOGRAD.format(path=path, attribute=path.replace(":", "."))
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["right"], done.stderr
