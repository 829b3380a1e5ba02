"""The bench names the rows of a run in which another provider is faster."""

from __future__ import annotations

from bench_points import point
from liger_ops.bench.show import Points, losses


def test_a_row_is_lost_by_more_than_three_percent() -> None:
    points = Points([point("liger_ops", 1.02), point("aten", 1.0), point("eager", 5.0)])
    points.add([point("low-memory", 0.5)])
    assert losses(points) == {}
    points.add([point("inductor", 0.9)])
    row = ("rms_norm", "bfloat16", "32768x4096", "forward")
    assert losses(points) == {row: "inductor 0.900 ms, liger_ops 1.020: 13% more"}
