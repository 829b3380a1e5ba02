"""npu.md must agree with a fresh measurement of this project's kernels, but not of others'."""

from __future__ import annotations

import pytest

from compare import differences, own

DOCUMENT = """\
# The Ascend kernels

Prose.

### rms_norm

| shape |  | kernel | tile | grid | UB |
| --- | --- | --- | --- | --- | --- |
| 4096x100 | forward | `rms_norm_kernel` | 16x128 | 40 | 38304 |
| 4096x512 | forward | `rms_norm_kernel` | 8x512 | 40 | 57344 |

## Beside Liger-Kernel 0.8.5

Prose.

| op | columns |  | tile here | UB | tile there | UB | found there |
| --- | --- | --- | --- | --- | --- | --- | --- |
| rms_norm | 4096 | forward | 1x4096 | 58% | 2x4096 | 96% | does not fit (8.5.0) |
"""


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ("38304", "38336", "rms_norm: | 4096x100 |"),
        ("58%", "59%", "Beside Liger-Kernel 0.8.5: | rms_norm | 4096 | forward |"),
        ("# The Ascend kernels", "# The kernels", "The Ascend kernels: "),
    ],
)
def test_what_is_said_of_a_kernel_here_is_compared(old, new, place):
    lines = differences(DOCUMENT, DOCUMENT.replace(old, new))
    assert any(place in line and old in line for line in lines), lines
    assert any(new in line for line in lines), lines


def test_a_peers_figures_may_differ():
    for old, new in (("96%", "100%"), ("does not fit (8.5.0)", ""), ("2x4096", "1x4096")):
        assert differences(DOCUMENT, DOCUMENT.replace(old, new)) == []


def test_nothing_else_is_left_out():
    assert differences(DOCUMENT, DOCUMENT) == []
    lines = DOCUMENT.splitlines(keepends=True)
    assert len(list(own(DOCUMENT))) == len(lines)
    lines[8], lines[9] = lines[9], lines[8]
    assert differences(DOCUMENT, "".join(lines)) == ["the same lines, in another order"]
    assert differences(DOCUMENT, DOCUMENT.partition("## Beside")[0])
