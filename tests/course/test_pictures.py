"""The pictures of lessons."""

import re

import pytest

from workbench import course


@pytest.mark.parametrize("size", [1, 14, 17, 18, 19, 25, 36, 60])
def test_no_label_of_a_bar_is_cut_at_the_left(size):
    """A character of a font of 11 pixels is 6.62 pixels wide in the widest of the fonts."""
    picture = course.bars({"a" * size: 1.0, "b": 2.0}, "lengths", "steps").svg
    width = float(re.search(r'width="(\d+)"', picture)[1])
    texts = re.findall(r'<text x="([\d.]+)" .*? text-anchor="(\w+)">(.*?)</text>', picture)
    bars = [float(x) for x in re.findall(r'<rect x="([\d.]+)"', picture)]
    assert len(texts) == 4 and len(set(bars)) == 1
    for x, anchor, label in texts:
        room = float(x) if anchor == "end" else width - float(x)
        assert 6.62 * len(label) <= room, label
        assert anchor == "start" or float(x) < bars[0]
