"""A GPU's autocast rules on a CPU: norms compute in float32."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import torch

from liger_ops import autograd, library

NORMS = (
    "layer_norm", "rms_norm", "modulated_layer_norm", "modulated_rms_norm", "fused_add_rms_norm",
)  # fmt: skip


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Give a CPU the autocast rules of a GPU, for PyTorch's norms and for the ops."""
    excluded = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    cast = lambda one: autograd.autocast_value(one, torch.float32)

    def layer_norm(x, shape, weight=None, bias=None, eps=1e-5, cudnn=True):
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return torch.layer_norm(cast(x), shape, cast(weight), cast(bias), eps, cudnn)

    def rms_norm(x, shape, weight=None, eps=None):
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return torch.rms_norm(cast(x), shape, cast(weight), eps)

    scoped = torch.library._scoped_library
    keys = mock.patch.dict(library.AUTOCAST_KEYS, cpu="AutocastCPU")
    with keys, scoped("aten", "IMPL") as aten, scoped("liger", "IMPL") as liger:
        aten.impl("layer_norm", layer_norm, "AutocastCPU")
        aten.impl("rms_norm", rms_norm, "AutocastCPU")
        for name in NORMS:
            keep = ("scale", "shift") if name.startswith("modulated") else ()
            op = library.OPS[name]
            on_cpu = SimpleNamespace(
                name=op.name, overload=op.overload, schema=op.schema,
                custom_op=SimpleNamespace(_lib=liger),
            )  # fmt: skip
            autograd.under_autocast(on_cpu, "AutocastCPU", cast, keep)
        yield
