"""The bench writes records, a table, a comparison, a page and plots of a run."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from bench_points import SHARED, SIX, full_house, point, rates, timed
from liger_ops.bench import records, show
from liger_ops.bench.show import Points

FIELDS = [
    "kernel_name", "kernel_provider", "metric_name", "metric_unit", "gpu_name", "x_name", "x_label",
    "x_values", "y_values_50", "y_values_20", "y_values_80", "kernel_operation_mode",
    "extra_benchmark_config_str", "timestamp", "version",
]  # fmt: skip


def test_records_have_the_fields_of_the_field() -> None:
    points = [
        point("liger_ops", 0.5, shape="32768x4096"), point("liger_ops", 0.25, shape="32768x1024"),
        point("quack", None, note="ImportError: no"), point("liger_ops", math.nan, metric="error"),
    ]  # fmt: skip
    found = records.as_records(points, *SHARED.values())
    assert all(list(record) == FIELDS for record in found)
    speed, failed, error = found
    assert speed["x_values"] == ["32768x4096", "32768x1024"]
    assert speed["y_values_50"] == [0.5, 0.25]
    assert speed["y_values_20"] == pytest.approx([0.45, 0.225])
    assert speed["y_values_80"] == pytest.approx([0.6, 0.3])
    assert (speed["kernel_name"], speed["metric_name"], speed["metric_unit"]) == (
        "rms_norm",
        "speed",
        "ms",
    )
    assert (speed["gpu_name"], speed["timestamp"], speed["version"]) == tuple(SHARED.values())
    assert json.loads(speed["extra_benchmark_config_str"]) == {"dtype": "bfloat16"}
    assert failed["y_values_50"] == [None]
    assert json.loads(failed["extra_benchmark_config_str"])["note"] == "ImportError: no"
    assert error["y_values_50"] == [None]


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    points = [*rates(), *timed("liger_ops", 0.5, 90.0), point("quack", None, note="no")]
    file = tmp_path / "run.json"
    records.write(file, points, *SHARED.values())
    assert list(tmp_path.iterdir()) == [file]
    read, shared = records.read(file)
    assert list(read) == points
    assert shared == SHARED
    assert read.facts() == {"command": "the command", "torch": "2.11.0"}


def test_the_table_fits_a_terminal() -> None:
    text = show.blocks(full_house())
    assert max(map(len, text.splitlines())) <= 80
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines()[1:] if line}
    assert rows["liger_ops"] == SIX[1:]
    assert rows["forward"] == ["161.3", "101%"] * 6
    assert rows["peak"] == ["MB"] + ["12024"] * 6
    assert rows["host"] == ["fwd"] + ["12024"] * 6


def test_the_table_says_what_failed_and_the_summary_what_is_lost() -> None:
    points = Points([*rates(), *timed("liger_ops", 0.13, 94.6), point("aten", None, note="why")])
    points.add(timed("liger_ops", 0.3, 70.0, mode="backward"))
    points.add([point("quack", 0.25, mode="backward")])
    text = show.blocks(points)
    assert "failed" in text and "  aten: why" in text
    assert show.summary(points).splitlines() == [
        "copies at 4000 GB/s, multiplies matrices at 700 TFLOP/s",
        "rows: 1 of 2 fastest or within 3% of the fastest",
        "  lost: rms_norm 32768x4096 bfloat16 backward: quack 0.250 ms, liger_ops 0.300: 20% more",
    ]


def test_compared_names_what_changed() -> None:
    rows = {"a": (1.0, 1.02), "b": (1.0, 1.5), "c": (1.0, 0.5)}
    then = Points([*rates(), *(point("liger_ops", old, kernel=k) for k, (old, _) in rows.items())])
    now = Points(
        [*rates(4100.0), *(point("liger_ops", new, kernel=k) for k, (_, new) in rows.items())]
    )
    now.add([point("liger_ops", 1.0, kernel="d"), point("eager", 9.0, kernel="a")])
    assert show.compared(now, then).splitlines() == [
        "against the earlier run:",
        "  copies at 4100 GB/s, then at 4000",
        "  slower: b 32768x4096 bfloat16 forward 1.000 -> 1.500 ms (+50%)",
        "  faster: c 32768x4096 bfloat16 forward 1.000 -> 0.500 ms (-50%)",
        "  1 rows within 3%",
    ]


def test_the_page_keeps_its_prose(tmp_path: Path) -> None:
    page = tmp_path / "docs" / "benchmarks.md"
    points = full_house()
    points.add([point("inductor", 1.0)])
    show.write_page(page, points, SHARED, tmp_path / "docs" / "plots")
    text = page.read_text()
    assert "the command" in text and "a GPU, 2026-01-02 03:04:05, liger_ops 0.1.0, torch 2" in text
    assert "](plots/rms_norm_bfloat16.png)" in text
    assert "| M x N | mode | liger_ops | eager | aten | inductor | liger-kernel | quack |\n" in text
    assert "| 32768x4096 | forward ms | 161.3 101% |" in text
    assert "| rms_norm | 32768x4096 | bfloat16 | forward | inductor 1.000 ms" in text
    page.write_text(f"Before.\n{text}After.\n")
    fewer = Points([*rates(), *timed("liger_ops", 0.5, 90.0)])
    show.write_page(page, fewer, SHARED, None)
    text = page.read_text()
    assert text.startswith("Before.\n# Benchmarks\n") and text.endswith("After.\n")
    assert text.count("# Benchmarks\n") == text.count("After.") == 1
    assert "161.3" not in text and ".png" not in text
    assert "None: no provider is faster" in text


def test_a_page_without_markers_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("prose\n")
    with pytest.raises(ValueError, match="has no lines <!-- figures: begin -->"):
        show.write_page(page, full_house(), SHARED, None)
    assert page.read_text() == "prose\n"


def test_plots_are_a_file_for_each_op_and_dtype(tmp_path: Path) -> None:
    points = full_house()
    points.add(timed("liger_ops", 1.0, 50.0, dtype="float32", shape="8x8"))
    points.add([point("liger_ops", 1.0, kernel="softmax")])
    files = show.plot(points, tmp_path / "plots")
    assert sorted(file.name for file in files) == ["rms_norm_bfloat16.png", "rms_norm_float32.png"]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)
    assert show.plot_name("rms_norm", "float32") == "rms_norm_float32.png"
