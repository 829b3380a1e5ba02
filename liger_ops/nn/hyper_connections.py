"""Manifold-constrained hyper-connections, as modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..ops.hyper_connections.mhc_coeffs import mhc_coeffs
from ..ops.hyper_connections.mhc_post_res import mhc_post_res
from ..ops.hyper_connections.mhc_pre import mhc_pre
from .derived import check_size, documented, named

__all__ = ["MHC", "MHCCoeffs", "MHCPostRes", "MHCPre"]


@documented(mhc_coeffs)
class MHCCoeffs(nn.Module):
    """The coefficients of a manifold-constrained hyper-connection.

    Args:
        hc: the number of streams, from 1 to 64.
        hidden_size: the channels C of a stream.
        phi_dtype: the dtype of phi; None for PyTorch's default. The other parameters are float32.

    Attributes:
        phi: (hc * C, hc * hc + 2 * hc). It starts as normally distributed values times 0.02.
        b: (hc * hc + 2 * hc,). It starts as 0.
        alpha_pre, alpha_post, alpha_res: (). They start as 1.

    Example:
        >>> h_pre, h_post, h_res = liger_ops.nn.MHCCoeffs(2, 8)(torch.zeros(3, 2, 8))
        >>> h_pre.shape, h_res[0].detach()
        (torch.Size([3, 2]), tensor([[0.5000, 0.5000],
                [0.5000, 0.5000]]))
    """

    def __init__(
        self, hc: int, hidden_size: int, tmax: int = 20, rms_eps: float = 1e-6,
        pre_eps: float = 0.0, sinkhorn_eps: float = 1e-6, post_mult: float = 2.0,
        phi_dtype: torch.dtype | None = None, device: torch.device | str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        name = type(self).__name__
        check_size(name, "hc", hc)
        check_size(name, "hidden_size", hidden_size)
        self.hc, self.hidden_size = hc, hidden_size
        self.tmax, self.rms_eps, self.pre_eps = tmax, rms_eps, pre_eps
        self.sinkhorn_eps, self.post_mult = sinkhorn_eps, post_mult
        columns = hc * hc + 2 * hc
        fp32: dict[str, Any] = {"device": device, "dtype": torch.float32}
        self.phi = nn.Parameter(
            torch.empty(hc * hidden_size, columns, device=device, dtype=phi_dtype)
        )
        self.b = nn.Parameter(torch.empty(columns, **fp32))
        self.alpha_pre = nn.Parameter(torch.empty((), **fp32))
        self.alpha_post = nn.Parameter(torch.empty((), **fp32))
        self.alpha_res = nn.Parameter(torch.empty((), **fp32))
        # Raises the op's own errors for wrong options now, not at the first forward.
        nothing, one = torch.empty(0, hc, hidden_size, device="meta"), self.alpha_pre.to("meta")
        meta = (self.phi.to("meta"), self.b.to("meta"), one, one, one)
        mhc_coeffs(nothing, *meta, *self._options())
        self.reset_parameters()

    def _options(self) -> tuple[int, float, float, float, float]:
        return self.tmax, self.rms_eps, self.pre_eps, self.sinkhorn_eps, self.post_mult

    def reset_parameters(self) -> None:
        """Draw phi from a normal distribution, and set b to 0 and the alphas to 1."""
        nn.init.normal_(self.phi, std=0.02)
        nn.init.zeros_(self.b)
        for alpha in (self.alpha_pre, self.alpha_post, self.alpha_res):
            nn.init.ones_(alpha)

    def coefficients(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute h_pre, h_post and h_res of x."""
        if x.shape[-2:] != (self.hc, self.hidden_size):
            raise ValueError(
                f"{type(self).__name__}: x must be (..., {self.hc}, {self.hidden_size}),"
                f" got shape {tuple(x.shape)}"
            )
        alphas = (self.alpha_pre, self.alpha_post, self.alpha_res)
        arguments: tuple[Any, ...] = (x, self.phi, self.b, *alphas, *self._options())
        return mhc_coeffs(*arguments)

    def forward(self, x: Tensor) -> Any:
        return self.coefficients(x)

    def extra_repr(self) -> str:
        options = named(self, "tmax", "rms_eps", "pre_eps", "sinkhorn_eps", "post_mult")
        return f"{self.hc}, {self.hidden_size}, {options}"


class MHC(MHCCoeffs):
    """A layer between the streams of a manifold-constrained hyper-connection.

        h_pre, h_post, h_res = mhc_coeffs(x, ...)
        f_out = layer(mhc_pre(x, h_pre))
        y     = mhc_post_res(x, f_out, h_post, h_res)

    The layer's input is converted to the dtype of its first floating point parameter.

    Args:
        layer: a module that takes and returns (..., C).
        The others: as for `MHCCoeffs`. By default, `device` is that of the layer's first parameter.

    Attributes:
        layer, and the attributes of `MHCCoeffs`. Liger-Kernel's LigerMHC has the same names.

    Shape:
        x: (..., hc, C), floating point, any strides; y: the same, contiguous.

    Raises:
        TypeError, ValueError: as `MHCCoeffs`.

    Example:
        >>> mhc = liger_ops.nn.MHC(torch.nn.Linear(8, 8), hc=2, hidden_size=8)
        >>> mhc(torch.zeros(3, 2, 8)).shape
        torch.Size([3, 2, 8])
    """

    def __init__(
        self, layer: nn.Module, hc: int, hidden_size: int, tmax: int = 20, rms_eps: float = 1e-6,
        pre_eps: float = 0.0, sinkhorn_eps: float = 1e-6, post_mult: float = 2.0,
        phi_dtype: torch.dtype | None = None, device: torch.device | str | None = None,
    ) -> None:  # fmt: skip
        if device is None:
            device = next((parameter.device for parameter in layer.parameters()), None)
        super().__init__(
            hc, hidden_size, tmax, rms_eps, pre_eps, sinkhorn_eps, post_mult, phi_dtype, device
        )
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        h_pre, h_post, h_res = self.coefficients(x)
        dtypes = (p.dtype for p in self.layer.parameters() if p.is_floating_point())
        f_out = self.layer(mhc_pre(x, h_pre).to(next(dtypes, x.dtype)))
        return mhc_post_res(x, f_out, h_post, h_res)


@documented(mhc_pre)
class MHCPre(nn.Module):
    """The weighted sum of the streams of a hyper-connection.

    Example:
        >>> liger_ops.nn.MHCPre()(torch.ones(1, 2, 3), torch.ones(1, 2))
        tensor([[2., 2., 2.]])
    """

    def forward(self, x: Tensor, h_pre: Tensor) -> Tensor:
        return mhc_pre(x, h_pre)


@documented(mhc_post_res)
class MHCPostRes(nn.Module):
    """The streams of a hyper-connection after a layer.

    Example:
        >>> x, f_out, h_post = torch.ones(1, 2, 1), torch.ones(1, 1), torch.ones(1, 2)
        >>> liger_ops.nn.MHCPostRes()(x, f_out, h_post, torch.eye(2).unsqueeze(0))
        tensor([[[2.],
                 [2.]]])
    """

    def forward(self, x: Tensor, f_out: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
        return mhc_post_res(x, f_out, h_post, h_res)
