"""moe_experts on NPUs: the definition, whose products and activations are PyTorch's."""

from ...common.definition import run_definition

run_definition("moe_experts", "npu", __name__)
