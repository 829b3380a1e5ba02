"""moe_experts on NPUs: the definition, whose products and activations are PyTorch's."""

from .... import library
from ...common.definition import run_definition

for _name in ("moe_experts_forward", "moe_experts_backward"):
    library.kernel(_name, "npu", allocates=True, module=__name__)(run_definition(_name))
