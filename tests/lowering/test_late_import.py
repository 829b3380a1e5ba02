"""A device's kernels, and Triton with them, are imported by the first call of an op on the device.

Each test runs in its own process, because the tests of other files import the kernels.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.quick

FIRST_CALL = """
import sys, threading
import torch, liger_ops
from liger_ops import library

assert "triton" not in sys.modules and "torch.utils.flop_counter" not in sys.modules
# Triton's interpreter runs one kernel at a time, and tensors without rows none.
x, empty, errors = torch.randn(3, 8), torch.empty(0, 8), []
calls = {"rms_norm": (empty,), "softmax": (empty,), "swiglu": (empty, empty)}
entries = {name: dict(op.entries) for name, op in library.OPS.items()}
start = threading.Barrier(len(calls))

def call(name, args):
    start.wait()
    try:
        assert library.OPS[name].kernels["cuda"](*args).shape == (0, 8)
    except BaseException as error:
        errors.append((name, error))

threads = [threading.Thread(target=call, args=item) for item in calls.items()]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not errors, errors
assert "triton" in sys.modules
torch.testing.assert_close(library.OPS["rms_norm"].kernels["cuda"](x), liger_ops.rms_norm(x))
assert entries == {name: op.entries for name, op in library.OPS.items()}
for op in library.OPS.values():
    assert library.implementation(op, "cuda").startswith("lowering.cuda."), op.name

from torch.utils.flop_counter import FlopCounterMode
with FlopCounterMode(display=False) as counter:
    liger_ops.linear_cross_entropy(x, torch.randn(5, 8), torch.tensor([0, 1, 2]))
assert counter.get_total_flops() == 2 * 3 * 5 * 8
"""

FAILING = """
import torch, liger_ops
from liger_ops import library

op, x = library.OPS["rms_norm"], torch.randn(3, 8)
liger_ops.rms_norm(x)
for call in (op.kernels["cuda"], lambda x: library.implementation(op, "cuda")) * 2:
    try:
        call(x)
    except ImportError as error:
        print(error)
"""


def run(code: str, *path: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, (*path, ROOT))),
            "TRITON_INTERPRET": "1",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_first_call_imports_the_kernels_for_every_thread() -> None:
    run(FIRST_CALL)


def test_a_toolchain_that_does_not_import_is_named_at_each_call(tmp_path: Path) -> None:
    (tmp_path / "triton.py").write_text("raise ImportError('libtriton.so: not found')\n")
    error = "the import of the kernels for cuda failed: libtriton.so: not found"
    assert run(FAILING, tmp_path).splitlines() == [f"liger_ops: {error}"] * 4
