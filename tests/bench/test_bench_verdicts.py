"""What the bench judges of a run: targets of time, memory and the host, and rows that are lost."""

from __future__ import annotations

from bench_points import point, timed
from liger_ops.bench import targets
from liger_ops.bench.points import Points
from liger_ops.bench.verdicts import losses, verdicts


def test_targets_are_judged_for_bfloat16_and_what_ran() -> None:
    points = Points(timed("liger_ops", 0.13, 94.4))
    points.add(timed("liger_ops", 0.13, 10.0, dtype="float32"))
    points.add(timed("eager", 0.13, 10.0, mode="backward"))
    points.add([point("liger_ops", None, mode="backward", note="no memory")])
    judged = {(v.mode, v.met, v.text) for v in verdicts(points)}
    assert judged == {("forward", False, "95%: 94%"), ("backward", False, "87%: no memory")}


def test_memory_is_judged_beyond_the_gradients() -> None:
    where = {"kernel": "linear_cross_entropy", "shape": "8192x2048x128256", "mode": "full"}
    for peak, met in ((1233.0, True), (1235.0, False)):
        points = Points(timed("liger_ops", 20.0, 88.0, **where))
        points.add([point("liger_ops", peak, metric="memory", **where)])
        points.add([point("liger_ops", 534.0, metric="gradients", **where)])
        assert [(v.mode, v.met) for v in verdicts(points)] == [("full", True), ("memory", met)]


def test_the_host_is_judged_against_the_peers() -> None:
    kernel, shape, mode = targets.HOST_OF
    where = {"kernel": kernel, "shape": shape, "mode": mode}
    points = Points(
        point(name, us, metric="host", **where)
        for name, us in (("liger_ops", 150.0), ("quack", 301.0), ("liger-kernel", 299.0))
    )
    judged = {v.text.split("'")[0].split()[-1]: v.met for v in verdicts(points)}
    assert judged == {"quack": True, "liger-kernel": False}


def test_a_row_is_lost_by_more_than_three_percent() -> None:
    points = Points([point("liger_ops", 1.02), point("aten", 1.0), point("eager", 5.0)])
    points.add([point("low-memory", 0.5)])
    assert losses(points) == []
    points.add([point("inductor", 0.9)])
    (loss,) = losses(points)
    assert (loss.winner, loss.text) == (
        "inductor",
        "inductor 0.900 ms, liger_ops 1.020: 13% more",
    )
