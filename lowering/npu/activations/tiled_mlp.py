"""tiled_mlp: PyTorch's products between the kernels of swiglu and geglu."""

from ...common.activations.tiled_mlp import register

register("npu", __name__)
