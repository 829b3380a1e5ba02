"""What holds for every kind of module that `fuse` replaces the code of."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from test_fuse_norms import NeverWidened, OneRounding, Rms
from torch import nn

from gated_modules import Gated, Limited, activated
from liger_ops import fuse
from liger_ops.fusion.layers.gated import GatedMLPs
from liger_ops.fusion.layers.kind import Kind
from liger_ops.fusion.layers.norms import Norms

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
    found = kind.found
    monkeypatch.setattr(
        kind, "found", lambda self, module: traced.append(module) or found(self, module)
    )
    model = nn.ModuleList([*(make() for _ in range(20)), *others])
    report = fuse(model)
    assert len(report) == len(model) and len(traced) == 1 + len(others)
    options = [(entry.op, str(entry.options)) for entry in report.fused]
    assert len(set(options[:20])) == 1 and len(set(options[19:])) >= len(others)
