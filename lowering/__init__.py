"""Kernels for devices.

A device's ops are registered if its toolchain is installed: Triton for cuda, torch_npu with
triton-ascend for npu. No device needs to be present. The first call of an op on the device imports
its folder, and with it Triton, which takes longer than everything else of `import liger_ops`.
Triton and triton-ascend are two distributions of one package, `triton`; an environment has at most
one of them.
"""

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from .. import library


def _has_triton_ascend() -> bool:
    try:
        version("triton-ascend")
    except PackageNotFoundError:
        return False
    return True


if _has_triton_ascend():
    if find_spec("torch_npu") is not None:
        library.import_kernels_late("npu")
elif find_spec("triton") is not None:
    library.import_kernels_late("cuda")
