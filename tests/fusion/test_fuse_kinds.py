"""Every kind of module whose code `fuse` replaces follows the same rules."""

from __future__ import annotations

import copy
import inspect
import io
from collections.abc import Callable

import pytest
import torch
from test_fuse_changes import KINDS
from torch import nn
from torch.utils import _pytree as pytree

from called_ops import called
from gated_modules import Gated, Limited, activated
from liger_ops import fuse, unfuse
from liger_ops.fusion.layers.gated import GatedMLPs
from liger_ops.fusion.layers.kind import Kind
from liger_ops.fusion.layers.norms import Norms
from norm_modules import NeverWidened, OneRounding, Rms
from rewriting import Rewriter


@pytest.mark.parametrize("kind", KINDS)
def test_copies_and_compiles_and_is_restored(kind: str) -> None:
    """A second call of `fuse` changes nothing, and only the class of a module is another."""
    torch.manual_seed(1)
    make, given, _ = KINDS[kind]
    plain, args = make(), given()
    fused = copy.deepcopy(plain)
    count = len(fuse(fused))
    cls, (expected, ops) = type(fused), called(fused, *args)
    assert count and ops and not called(plain, *args)[1]
    assert not fuse(fused).fused and type(fused) is cls
    assert inspect.signature(fused.forward) == inspect.signature(plain.forward)
    assert (repr(fused), fused.state_dict().keys()) == (repr(plain), plain.state_dict().keys())
    file = io.BytesIO()
    torch.save(fused, file)
    file.seek(0)
    for other in (copy.deepcopy(fused), torch.load(file, weights_only=False)):
        found, counts = called(other, *args)
        assert counts == ops and all(map(torch.equal, found, expected))
    torch._dynamo.reset()
    rewriter = Rewriter(())
    compiled = torch.compile(copy.deepcopy(fused), backend=rewriter, fullgraph=True)
    torch.testing.assert_close(pytree.tree_leaves(compiled(*args)), expected)
    assert {op: len(rewriter.calls(op)) for op in ops} == ops
    assert unfuse(fused) == count and type(fused) is type(plain)
    assert not called(fused, *args)[1]


# Equal modules, and others.
MODULES: dict[str, tuple[type[Kind], Callable[[], nn.Module], list[nn.Module]]] = {
    "norms": (Norms, Rms, [Rms(16), Rms(eps=1e-5), OneRounding(), NeverWidened()]),
    "activations": (GatedMLPs, Gated, [activated("gelu"), Limited(), Limited(3)]),
}


@pytest.mark.parametrize("name", MODULES)
def test_equal_modules_are_traced_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of equal class, sizes, dtype and attributes share a trace."""
    kind, make, others = MODULES[name]
    traced: list[nn.Module] = []
    found = kind.derive_facts
    monkeypatch.setattr(
        kind, "derive_facts", lambda self, module: traced.append(module) or found(self, module)
    )
    model = nn.ModuleList([*(make() for _ in range(20)), *others])
    report = fuse(model)
    assert len(report) == len(model) and len(traced) == 1 + len(others)
    options = [(entry.op, str(entry.options)) for entry in report.fused]
    assert len(set(options[:20])) == 1 and len(set(options[19:])) >= len(others)
