"""The implementations of a workload: liger_ops, PyTorch in three ways, and the installed peers."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType

import torch

from .workloads.entry import Entry, Function

OURS = "liger_ops"
# liger_ops' op with its options for less memory.
LOW_MEMORY = "low-memory"
# Peer -> the module with its functions, imported when it is first needed.
MODULES = {
    "liger-kernel": "liger_kernel.transformers.functional",
    "quack": "quack",
    "trl": "trl.trainer.utils",
}
PROVIDERS = (OURS, LOW_MEMORY, "eager", "aten", "inductor", *MODULES)


class Peers:
    """The peers' packages, each imported at most once."""

    def __init__(self) -> None:
        self._modules: dict[str, ModuleType | None] = {}
        # Peer -> one line with the reason that it cannot be imported.
        self.missing: dict[str, str] = {}

    def module(self, name: str) -> ModuleType | None:
        if name not in self._modules:
            try:
                self._modules[name] = importlib.import_module(MODULES[name])
            # A package built for another machine can raise anything when imported.
            except Exception as error:
                self._modules[name] = None
                self.missing[name] = one_line(error)
        return self._modules[name]


def functions(entry: Entry, names: Sequence[str], peers: Peers) -> dict[str, Function]:
    """Return for each provider in `names` its function for the op, if it has one and the provider
    can be imported.

    If a provider's function cannot be made, calling it raises the reason.
    """
    local = {
        OURS: entry.ours, LOW_MEMORY: entry.low_memory, "eager": entry.eager, "aten": entry.aten
    }  # fmt: skip
    by_provider: dict[str, Function] = {}
    for name in names:
        if name == "inductor":
            # The code of models, compiled as users do, for static sizes.
            by_provider[name] = torch.compile(entry.definition, dynamic=False)
        elif (function := local.get(name)) is not None:
            by_provider[name] = function
        elif name in entry.peers and (module := peers.module(name)) is not None:
            peer = entry.peers[name]
            try:
                by_provider[name] = getattr(module, peer) if isinstance(peer, str) else peer(module)
            except Exception as error:
                by_provider[name] = _raiser(error)
    return by_provider


def _raiser(error: Exception) -> Function:
    def function(*tensors: object) -> None:
        raise error

    return function


def one_line(error: BaseException) -> str:
    """Return the name of the error's class and the first line of its text."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."
