"""Kernels for devices, and graph rewrites.

A device's folder is imported, and registers its kernels, if its toolchain is installed: Triton for
cuda, torch_npu with triton-ascend for npu. No device needs to be present. Triton and triton-ascend
are two distributions of one package, `triton`; an environment has at most one of them.
"""

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec


def _has_triton_ascend() -> bool:
    try:
        version("triton-ascend")
    except PackageNotFoundError:
        return False
    return True


if _has_triton_ascend():
    if find_spec("torch_npu") is not None:
        from . import npu
elif find_spec("triton") is not None:
    from . import cuda
