"""Bars for the tables of milliseconds: the numbers that stand in the table, from 0."""

from __future__ import annotations

import re
from html import escape

TABLE = re.compile(r"(?:^\|.*\n){4,}", re.MULTILINE)
HEADERS = ("ms", "ms a step")
# "231.0", or "231.0 (226.4 to 234.8)" with the 20th and 80th percentile.
TIME = re.compile(r"(\d+(?:\.\d+)?)(?: \((\d+(?:\.\d+)?) to (\d+(?:\.\d+)?)\))?")
# What the row of an op of this package is called by.
OURS = re.compile(r"liger_ops|backend=\"liger\"")


def with_charts(markdown: str) -> str:
    """Put a chart above each table that has the time of a step in its second column."""
    return TABLE.sub(lambda table: f"{chart(table.group())}{table.group()}", markdown)


def chart(table: str) -> str:
    """Return the bars of a table as HTML, and nothing for one with other columns or numbers."""
    lines = [line.strip("|\n").split("|") for line in table.splitlines()]
    header, _, *rows = ([cell.strip() for cell in line] for line in lines)
    times = [TIME.fullmatch(row[1]) for row in rows]
    if header[1] not in HEADERS or not all(times):
        return ""
    numbers = [[float(part) if part else None for part in time.groups()] for time in times if time]
    # The numbers beside the bars take the rest.
    longest = max(number for row in numbers for number in row if number is not None) / 0.85
    bars = []
    for row, (time, low, high) in zip(rows, numbers, strict=True):
        assert time is not None
        shown = row[1].partition(" ")[0]
        name, ours = row[0].replace("`", ""), " ours" * bool(OURS.search(row[0]))
        spread, end = "", time
        if low is not None and high is not None:
            begin, width, end = low / longest, (high - low) / longest, high
            spread = f'<i class="spread" style="left:{begin:.2%};width:{width:.2%}"></i>'
        bars.append(
            f'<span class="label">{escape(name)}</span><span class="track">'
            f'<i class="bar{ours}" style="width:{time / longest:.2%}"></i>{spread}'
            f'<b style="left:{end / longest:.2%}">{shown} ms</b></span>'
        )
    return f'<div class="chart">{"".join(bars)}</div>\n\n'
