"""router_losses on NPUs: the definition, whose softmax, sort and sums are PyTorch's."""

from ...common.definition import run_definition

run_definition("router_losses", "npu", __name__)
