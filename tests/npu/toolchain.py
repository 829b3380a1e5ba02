"""What `setup` got: where it is, what is missing, and a cache of what was made with it."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
_USER_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
CACHE = Path(os.environ.get("LIGER_OPS_NPU_CACHE") or _USER_CACHE / "liger_ops" / "npu")

# Of ascendnpu-ir, with the CANN that ships the same compiler.
COMPILERS = {"1.0.0": "CANN 8.5.0", "1.1.0": "CANN 9.0.0", "1.2.0": "CANN 9.1.0"}
CPU_TOOLS = ("mlir-opt-19", "mlir-translate-19", "clang-19")

# A 910B4, the smallest of the 910B: its vector cores, and the Unified Buffer of each.
ARCH = "Ascend910B4"
VECTOR_CORES = 40
UB_BYTES = 196608


def compiler(version: str) -> Path:
    return CACHE / "npuir" / version / "bin" / "bishengir-compile"


def missing_compiler(version: str) -> str:
    """Why nothing can be planned with this version, or nothing."""
    found = (CACHE / "npuir" / version / "ready").exists()
    return "" if found else f"ascendnpu-ir {version} could not be had: see tests/npu/setup"


def missing_cpu_tools() -> str:
    """Why lowered code cannot be run, or nothing."""
    missing = [tool for tool in CPU_TOOLS if shutil.which(tool) is None]
    return f"{', '.join(missing)} could not be had: see tests/npu/setup" if missing else ""


def file_for(kind: str, key: str, suffix: str) -> Path:
    """Where the cache has what `key`, a text that says all it depends on, determines."""
    folder = CACHE / "results" / kind
    folder.mkdir(parents=True, exist_ok=True)
    return folder / (hashlib.sha256(key.encode()).hexdigest()[:32] + suffix)


def write(path: Path, data: bytes) -> None:
    """Write a file that another process never sees half of."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(data)
    os.replace(file.name, path)


def cached(kind: str, key: str, compute: Callable[[], Any]) -> Any:
    """What `compute` returned, which JSON can hold, now or in a run before."""
    path = file_for(kind, key, ".json.gz")
    if path.exists():
        path.touch()
        return json.loads(gzip.decompress(path.read_bytes()))
    value = compute()
    write(path, gzip.compress(json.dumps(value).encode(), 3))
    return value
