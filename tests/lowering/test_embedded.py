"""The host code of cuda kernels is traced for a package of AOTInductor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "support" / "embed_kernels.py"


def test_kernels_are_embedded() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, SCRIPT], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    records = [json.loads(line) for line in run.stdout.splitlines()]
    assert records and all(record["launches"] for record in records)
    assert not [record for record in records if record["unwritten"]]
