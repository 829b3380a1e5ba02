"""Groups of columns that the devices' bounds cut."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor


class Groups(NamedTuple):
    """A device's columns, from the column `first` on, among groups of `size` columns.

    The device computes with every group that it has a column of: the columns that it lacks are 0,
    and add nothing to the group's sums.
    """

    size: Any
    count: Any
    first: Any
    columns: Any

    @property
    def before(self) -> Any:
        """The columns of its first group that the device lacks."""
        return self.first % self.size

    @property
    def after(self) -> Any:
        return -(self.first + self.columns) % self.size

    def padded(self, tensor: Tensor) -> Tensor:
        return F.pad(tensor, (self.before, self.after))

    def cut(self, tensor: Tensor) -> Tensor:
        return tensor.narrow(-1, self.before, self.columns).contiguous()

    def among_all(self, statistic: Tensor) -> Tensor:
        """A number of each of the device's groups, (..., groups, 1), with 0 for the others."""
        after = self.count - self.first // self.size - statistic.shape[-2]
        return F.pad(statistic, (0, 0, self.first // self.size, after))

    def own(self, statistic: Tensor) -> Tensor:
        """The device's groups, of all."""
        own = (self.before + self.columns + self.after) // self.size
        return statistic.narrow(-2, self.first // self.size, own)
