"""Forms: the shapes and options with which the npu kernels of hyper-connections are tested."""

from __future__ import annotations

from launch_forms import BF16, ROWS, Fields, Forms

# Those of DeepSeek-V4 and of its small version, odd ones, and more streams than models have.
STREAMS = ((4, 4096), (3, 100), (8, 512))
EXECUTED: tuple[Fields, ...] = (
    {"shape": (5, 3, 100), "tile": (4, 32)},
    {"shape": (7, 4, 300)},
    {"shape": (3, 1, 33)},
)
NARROW = {"other_dtype": BF16}


def form(*alone: int, streams: tuple[tuple[int, int], ...] = STREAMS) -> Forms:
    """`alone` are the gradients that are each also asked for by themselves."""
    return Forms(
        shapes=tuple({"shape": (ROWS, hc, C)} for hc, C in streams),
        options=(NARROW,),
        backward_options=tuple(
            {"output_mask": tuple(wanted == i for wanted in range(6))} for i in alone
        ),
        counted={0: {"shape": (3, *STREAMS[0])}},
        executed=EXECUTED,
    )


MANY = (*STREAMS, (64, 100))
FORMS = {
    "mhc_pre": form(0, 1, streams=MANY),
    "mhc_post_res": form(0, 1, 2, streams=MANY),
    # Without the gradients of b and the alphas.
    "mhc_coeffs_forward": form(0),
}
