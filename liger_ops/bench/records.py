"""Read and write the file of a run: JSON, a list of records in the format of kernel benchmarks.

A record is a curve: an op, a provider, a metric, a mode, and the values over the shapes. A failed
call has a record of its own, whose values are null and whose configuration has the reason.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import astuple
from pathlib import Path
from typing import Any

from ..device import Spread
from .show import Point, Points

# Columns in the order of the fields of Spread.
COLUMNS = ("y_values_50", "y_values_20", "y_values_80")


def write(path: Path, points: Iterable[Point], gpu_name: str, timestamp: str, version: str) -> None:
    """Write all points, replacing the file atomically: a reader never finds half a file."""
    records = as_records(points, gpu_name, timestamp, version)
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_text(json.dumps(records, indent=1, allow_nan=False) + "\n")
    os.replace(unfinished, path)


def as_records(
    points: Iterable[Point], gpu_name: str, timestamp: str, version: str
) -> list[dict[str, Any]]:
    records: dict[tuple[str, ...], dict[str, Any]] = {}
    for point in points:
        config = {"dtype": point.dtype, **json.loads(point.facts)}
        if point.note:
            config["note"] = point.note
        text = json.dumps(config, sort_keys=True)
        key = (point.kernel, point.provider, point.metric, point.unit, point.mode, text)
        record = records.setdefault(
            key,
            {
                "kernel_name": point.kernel,
                "kernel_provider": point.provider,
                "metric_name": point.metric,
                "metric_unit": point.unit,
                "gpu_name": gpu_name,
                "x_name": "shape",
                "x_label": point.dims,
                "x_values": [],
                **{column: [] for column in COLUMNS},
                "kernel_operation_mode": point.mode,
                "extra_benchmark_config_str": text,
                "timestamp": timestamp,
                "version": version,
            },
        )
        record["x_values"].append(point.shape)
        values = astuple(point.value) if point.value else [None] * len(COLUMNS)
        for column, value in zip(COLUMNS, values, strict=True):
            # JSON has no NaN.
            record[column].append(value if value is not None and math.isfinite(value) else None)
    return list(records.values())


def read(path: Path) -> tuple[Points, dict[str, str]]:
    """Return the points of a file, and the facts that all its records share: GPU, time, version.

    Raises:
        ValueError: the file has no such records.
        OSError: the file cannot be read.
    """
    try:
        records = json.loads(path.read_text())
        points = points_of(records)
        names = {"gpu": "gpu_name", "timestamp": "timestamp", "version": "version"}
        return points, {name: records[0][field] for name, field in names.items()}
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(f"{path} holds no records of a benchmark: {error!r}") from None


def points_of(records: Iterable[dict[str, Any]]) -> Points:
    """Return the points of records as `as_records` returns them."""
    return Points(point for record in records for point in _points(record))


def _points(record: dict[str, Any]) -> list[Point]:
    config = json.loads(record["extra_benchmark_config_str"])
    dtype, note = config.pop("dtype"), config.pop("note", "")
    columns = [record[column] for column in COLUMNS]
    return [
        Point(
            kernel=record["kernel_name"],
            provider=record["kernel_provider"],
            metric=record["metric_name"],
            unit=record["metric_unit"],
            mode=record["kernel_operation_mode"],
            dims=record["x_label"],
            shape=shape,
            value=None if None in values else Spread(*values),
            dtype=dtype,
            note=note,
            facts=json.dumps(config),
        )
        for shape, *values in zip(record["x_values"], *columns, strict=True)
    ]
