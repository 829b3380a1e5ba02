"""Lower a launch with triton-ascend, from the kernel's source to the MLIR that Ascend's compiler
takes."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from importlib.metadata import version

from triton._C.libtriton import ir
from triton.backends.ascend.compiler import NPUOptions, make_ttir, ttir_to_linalg

from launches import BACKEND, Launch
from toolchain import cached

TRITON_ASCEND = version("triton-ascend")


@dataclass(frozen=True)
class Lowered:
    """The MLIR of a launch, or the error that prevented it."""

    mlir: str
    error: str


def lower(launch: Launch) -> Lowered:
    """Lower a launch, or return its result from the cache."""
    key = f"triton-ascend {TRITON_ASCEND} {launch.key}"
    return Lowered(**cached("lowered", key, lambda: _lower(launch)))


def _lower(launch: Launch) -> dict[str, str]:
    options = NPUOptions()
    context = ir.context()
    ir.load_dialects(context)
    BACKEND.load_dialects(context)
    metadata = {"hash": launch.source.hash(), "target": BACKEND.target, **options.__dict__}
    try:
        module = launch.source.make_ir(
            options, BACKEND.get_codegen_implementation(), BACKEND.get_module_map(), context
        )
        module = make_ttir(module, metadata, options)
        mlir = ttir_to_linalg(module, metadata, options, named_ops=True)
    except subprocess.CalledProcessError as error:
        return {"mlir": "", "error": (error.stderr or b"").decode(errors="replace")[-3000:]}
    except Exception as error:
        # The compiler's errors have no common class.
        return {"mlir": "", "error": f"{type(error).__name__}: {error}"[-3000:]}
    return {"mlir": mlir, "error": ""}
