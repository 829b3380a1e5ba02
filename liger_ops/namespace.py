"""The namespace of the ops in `torch.ops`."""

# A build for the kernels hub has a namespace of its own in place of this file (`hub/build.py`).
NAMESPACE = "liger"
