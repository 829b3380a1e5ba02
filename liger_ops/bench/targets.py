"""What liger_ops is to reach on an H200, in bfloat16, op by op: the table of figures."""

from __future__ import annotations

# (op, shape) to mode to percent of the copy rate measured in the same run; of linear_cross_entropy,
# of the matrix rate.
SHARES: dict[tuple[str, str], dict[str, float]] = {
    ("rms_norm", "32768x1024"): {"forward": 88, "backward": 75},
    ("rms_norm", "32768x4096"): {"forward": 95, "backward": 87},
    ("rms_norm", "16384x8192"): {"forward": 95, "backward": 87},
    ("rms_norm", "8192x16384"): {"forward": 94, "backward": 80},
    ("rms_norm", "4096x32768"): {"forward": 94, "backward": 80},
    ("rms_norm", "2048x65536"): {"forward": 94, "backward": 80},
    ("fused_add_rms_norm", "32768x4096"): {"forward": 95, "backward": 92},
    ("fused_add_rms_norm", "8192x16384"): {"forward": 95, "backward": 85},
    ("layer_norm", "32768x4096"): {"forward": 93, "backward": 80},
    ("layer_norm", "8192x16384"): {"forward": 93, "backward": 80},
    ("group_norm", "64x512x64x64"): {"forward": 85, "backward": 75},
    ("group_norm", "16x1280x32x32"): {"forward": 60, "backward": 50},
    ("swiglu", "16384x14336"): {"forward": 100, "backward": 99},
    ("geglu", "16384x14336"): {"forward": 100, "backward": 99},
    ("rope", "4x4096x32x8x128"): {"forward": 92, "backward": 92},
    ("softmax", "8192x4096"): {"forward": 88, "backward": 90},
    ("softmax", "8192x32768"): {"forward": 96, "backward": 97},
    ("cross_entropy", "8192x32768"): {"forward": 92, "full": 93},
    ("cross_entropy", "8192x128256"): {"forward": 92, "full": 93},
    ("linear_cross_entropy", "8192x2048x128256"): {"full": 88},
    ("linear_cross_entropy", "8192x4096x128256"): {"full": 90},
    ("linear_cross_entropy", "32768x4096x128256"): {"full": 92},
}
DTYPE = "bfloat16"

# The peak of linear_cross_entropy, beyond the gradients that it returns.
MB_BEYOND_GRADIENTS = 700.0

# At every shape, no provider is faster by more.
BEHIND = 0.03

# The host's time of rms_norm, forward and backward, over the time of these.
HOST_SHARE = 0.5
HOST_OF = ("rms_norm", "2048x4096", "full")
HOST_PEERS = ("liger-kernel", "quack")
