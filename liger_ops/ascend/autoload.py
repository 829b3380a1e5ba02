"""Import torch without torch_npu for `python -m liger_ops` and `python -m liger_ops.bench`.

`import torch` loads torch_npu where it is installed, and fails with it, for example in a shell that
has not sourced CANN's `set_env.sh`. These programs import torch_npu themselves, and say why it
fails.
"""

from __future__ import annotations

import os
import sys

VARIABLE = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def runs_this_package(words: list[str], arguments: list[str]) -> bool:
    """Return whether Python was started as `python -m liger_ops`, or `-m` of a module of it, and
    is importing the package for that. `words` are those of the command line, `arguments` is
    sys.argv, whose first item is "-m" until the module is found."""
    name = __name__.partition(".")[0]
    modules = (word.removeprefix("-m").partition(".")[0] for word in words)
    return arguments[:1] == ["-m"] and name in modules


if "torch" not in sys.modules and runs_this_package(sys.orig_argv, sys.argv):
    given = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "0"
    try:
        import torch  # noqa: F401
    finally:
        # For the processes that the program starts.
        del os.environ[VARIABLE]
        if given is not None:
            os.environ[VARIABLE] = given
