"""Labels beside points: within the picture, which cuts off what is not, and never over each other."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from zerokit.bench.report.labels import HEIGHT, lines_of, place_labels, text_width

WIDTH, ROOM, LINE = 300.0, 160.0, 15.0
TRIES = [
    (8.0, lane, "left") for lane in (0, *(side * step for step in range(8, HEIGHT, 8) for side in (-1, 1)))
]
NAMES = st.sampled_from(["DDP", "zerokit 3", "zerokit 3 · bf16 · batch 16 · 1024 tokens", "parameter server"])


@given(st.lists(st.tuples(st.sampled_from([0.5, 1.0]), st.floats(0, 1), NAMES), min_size=1, max_size=9))
def test_labels_are_whole_and_apart(points: list[tuple[float, float, str]]) -> None:
    rows = [{"x": x, "y": y, "name": name} for x, y, name in points]
    boxes = []
    for row in place_labels(rows, TRIES, ([0.0, 1.0], [0.0, 1.0], WIDTH, ROOM)):
        left = row["x"] * WIDTH + row["dx"]
        middle = (1.0 - row["y"]) * HEIGHT + row["dy"]  # of the first line
        lines = row["name"]
        right, bottom = left + min(max(map(text_width, lines)), 150.0), middle + LINE * (len(lines) - 0.5)
        boxes.append((left, middle - LINE / 2, right, bottom))
    for left, top, right, bottom in boxes:
        assert left >= 0.0
        assert top >= -1e-6
        assert bottom <= HEIGHT + 1e-6
        assert right <= WIDTH + ROOM + 1e-6
    for one, other in itertools.combinations(boxes, 2):
        apart = one[2] <= other[0] + 1e-6 or other[2] <= one[0] + 1e-6
        assert apart or one[3] <= other[1] + 1e-6 or other[3] <= one[1] + 1e-6


def test_a_long_name_takes_a_line_for_each_of_its_parts() -> None:
    assert lines_of("zerokit 3 · bf16") == ["zerokit 3 · bf16"]
    assert lines_of("zerokit 3 · bf16 · batch 16") == ["zerokit 3", "bf16", "batch 16"]
