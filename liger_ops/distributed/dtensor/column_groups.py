"""Groups of columns that the bounds between devices cut through."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor


class ColumnGroups(NamedTuple):
    """A device's `columns` columns, from column `first` on, in `count` groups of `size` columns.

    The device computes with every group that it has a column of: the columns that it lacks are 0,
    and add nothing to the group's sums.
    """

    size: Any
    count: Any
    first: Any
    columns: Any

    @property
    def before(self) -> Any:
        """The number of columns of the device's first group that the device lacks."""
        return self.first % self.size

    @property
    def after(self) -> Any:
        """The number of columns of the device's last group that the device lacks."""
        return -(self.first + self.columns) % self.size

    def pad(self, tensor: Tensor) -> Tensor:
        """Pad the device's columns to whole groups."""
        return F.pad(tensor, (self.before, self.after))

    def unpad(self, tensor: Tensor) -> Tensor:
        """Undo `pad`."""
        return tensor.narrow(-1, self.before, self.columns).contiguous()

    def among_all(self, statistic: Tensor) -> Tensor:
        """Pad a statistic of the device's groups, (..., groups, 1), with 0 for all other groups."""
        after = self.count - self.first // self.size - statistic.shape[-2]
        return F.pad(statistic, (0, 0, self.first // self.size, after))

    def local(self, statistic: Tensor) -> Tensor:
        """Select the device's groups from a statistic of all groups."""
        count = (self.before + self.columns + self.after) // self.size
        return statistic.narrow(-2, self.first // self.size, count)
