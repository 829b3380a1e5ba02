"""router_losses on NPUs: the definition, whose softmax, sort and sums are PyTorch's."""

from .... import library
from ...common.definition import run_definition

for _name in ("router_losses_forward", "router_losses_backward"):
    library.kernel(_name, "npu", allocates=True, module=__name__)(run_definition(_name))
