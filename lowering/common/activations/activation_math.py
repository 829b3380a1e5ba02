"""Arithmetic of activations and their gradients, for every device. Values are float32."""

import triton
import triton.language as tl


@triton.jit
def gated(gate, up, a, b, c, ACTIVATION: tl.constexpr):
    """Compute a gated activation. a, b and c are its scalar options, in their order."""
    if ACTIVATION == "swiglu":
        z = gate * a
        return z * tl.sigmoid(z) * up * b
    elif ACTIVATION == "clamped_swiglu":
        gate, up = _clamped(gate, up, b)
        return gate * tl.sigmoid(gate * a) * (up + c)
    elif ACTIVATION == "geglu_tanh":
        return gate * tl.sigmoid(_gelu_argument(gate)) * up
    else:
        return gate * _normal_cumulative(gate) * up


@triton.jit
def gated_gradients(dy, gate, up, a, b, c, ACTIVATION: tl.constexpr):
    """Compute the gradients of gate and up.

    dy is multiplied by the slope first: if the slope is 0 and up * dy would be inf, the product
    is 0.
    """
    if ACTIVATION == "swiglu":
        z = gate * a
        dy = dy * b
        return dy * silu_slope(z) * up * a, dy * (z * tl.sigmoid(z))
    elif ACTIVATION == "clamped_swiglu":
        inside_gate = (gate <= b).to(tl.float32)
        inside_up = (tl.abs(up) <= b).to(tl.float32)
        gate, up = _clamped(gate, up, b)
        z = gate * a
        dgate = dy * silu_slope(z) * (up + c) * inside_gate
        return dgate, dy * (gate * tl.sigmoid(z)) * inside_up
    elif ACTIVATION == "geglu_tanh":
        # Beyond 30 the sigmoid is 0 or 1, and gate**3 = inf would give 0 * inf.
        near = within(gate, 30.0)
        sigmoid = tl.sigmoid(_gelu_argument(near))
        derivative = 1.5957691216057308 * (1.0 + 0.134145 * near * near)
        slope = sigmoid * (1.0 + (1.0 - sigmoid) * near * derivative)
        return dy * slope * up, dy * (gate * sigmoid)
    else:
        cumulative = _normal_cumulative(gate)
        slope = cumulative + gate * tl.exp(gate * gate * -0.5) * 0.3989422804014327
        return dy * slope * up, dy * (gate * cumulative)


@triton.jit
def relu(x):
    """Compute max(x, 0); NaN stays NaN."""
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def within(x, limit):
    """Clamp x to [-limit, limit]; NaN stays NaN."""
    x = tl.minimum(x, limit, propagate_nan=tl.PropagateNan.ALL)
    return tl.maximum(x, -limit, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def silu_slope(z):
    """Compute the derivative of z * sigmoid(z)."""
    # Beyond 1000 the sigmoid is 0 or 1, and z = inf would give 0 * inf. The sigmoid is that of z
    # itself, which the other gradient needs too.
    sigmoid = tl.sigmoid(z)
    return sigmoid * (1.0 + within(z, 1000.0) * (1.0 - sigmoid))


@triton.jit
def _clamped(gate, up, limit):
    """Clamp gate from above, and up from both sides."""
    return tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL), within(up, limit)


@triton.jit
def _gelu_argument(x):
    """Compute 2 * v, where sigmoid(2 * v) = (1 + tanh(v)) / 2 is x's factor in GELU with tanh."""
    return 1.5957691216057308 * x * (1.0 + 0.044715 * x * x)


@triton.jit
def _normal_cumulative(x):
    return 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
