"""The marks that the code of the views has painted on a canvas, and the colours that a mark may have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from workbench.viz.palette import FOCUS_HUES, LIGHT


def mixed(colour: str, other: str, share: float) -> str:
    """A mixture of two #RRGGBB colours; ``share`` is the part of the second."""
    parts = [[int(text[i : i + 2], 16) for i in (1, 3, 5)] for text in (colour, other)]
    return "#" + "".join(f"{int(a + (b - a) * share + 0.5):02x}" for a, b in zip(*parts))


def hues_of(records: Iterable[Any]) -> dict[str, str]:
    """The hue of each request that has one, by going through the steps.

    A request that begins to run gets a hue that nobody had, or else the one whose holder ended first; never one whose
    holder still runs. It keeps its hue.
    """
    unused, given, ended, begun = list(FOCUS_HUES), {}, [], set()
    for record in records:
        for request_id in [chunk.request_id for chunk in record.chunks if chunk.request_id not in begun]:
            begun.add(request_id)
            if unused or ended:
                given[request_id] = (unused or ended).pop(0)
        ends = {event.request_id for event in record.events if event.kind in ("finish", "abort")}
        ended += [hue for hue in FOCUS_HUES if any(given.get(request_id) == hue for request_id in ends)]
    return given


class Colours:
    """The colours of a run."""

    def __init__(self, records: Iterable[Any]) -> None:
        self.hues = hues_of(records)

    def prefill(self, request_id: str) -> str:
        """The colour of prompt tokens."""
        return self.hues.get(request_id, LIGHT.prefill)

    def decode(self, request_id: str) -> str:
        """The colour of decode tokens."""
        hue = self.hues.get(request_id)
        return mixed(hue, LIGHT.background, 0.45) if hue else LIGHT.decode

    def of(self, chunk: Any) -> str:
        """The colour of a chunk."""
        return (self.decode if chunk.arm == "decode" else self.prefill)(chunk.request_id)

    def held(self, request_id: str) -> str:
        """The colour of a block in a table."""
        return self.hues.get(request_id, LIGHT.owned)


class Marks:
    """Painted marks, by their kind."""

    def __init__(self, marks: list[list[Any]]) -> None:
        self.all = marks

    def _of(self, kind: str) -> list[list[Any]]:
        return [mark[1:] for mark in self.all if mark[0] == kind]

    def rects(self, y: float | None = None, height: float | None = None, colour: str | None = None) -> list[list[Any]]:
        """Filled rectangles as [colour, x, y, width, height]."""
        found = [mark for mark in self._of("rect") if colour is None or mark[0] == colour]
        found = [mark for mark in found if y is None or abs(mark[2] - y) < 1e-6]
        return [mark for mark in found if height is None or abs(mark[4] - height) < 1e-6]

    def frames(self, colour: str | None = None) -> list[list[Any]]:
        """Outlined rectangles."""
        return [mark for mark in self._of("frame") if colour is None or mark[0] == colour]

    def texts(self, x: float | None = None, y: float | None = None) -> list[tuple[float, float, str]]:
        """Texts as (x, y, words)."""
        found = [(left, top, words) for _, left, top, words, _ in self._of("text")]
        found = [text for text in found if x is None or abs(text[0] - x) < 1e-6]
        return [text for text in found if y is None or abs(text[1] - y) < 1e-6]

    def words(self) -> list[str]:
        """All texts."""
        return [words for _, _, words in self.texts()]

    def filled(self) -> list[tuple[str, list[Any]]]:
        """Filled shapes: colour and path."""
        return [(mark[0], mark[1:]) for mark in self._of("filled")]

    def stroked(self) -> list[tuple[str, list[Any]]]:
        """Outlined shapes: colour and path."""
        return [(mark[0], mark[1:]) for mark in self._of("stroked")]

    def image(self) -> list[Any] | None:
        """The last image: x, y, width, height and its bytes."""
        return next((mark[1:] for mark in reversed(self._of("image"))), None)


def number(words: str) -> float:
    """A number as a picture writes it."""
    return float(words.replace(",", ""))


def grouped(value: int) -> str:
    """A whole number as a picture writes it."""
    return f"{value:,}"


def counted(value: int, noun: str) -> str:
    """A number with its noun."""
    return f"{grouped(value)} {noun}{'' if value == 1 else 's'}"


def span(first: int, last: int) -> str:
    """A half-open range."""
    return f"[{grouped(first)}, {grouped(last)})"


def seconds(value: float) -> str:
    """A duration as a picture writes it."""
    if value == 0:
        return "0 s"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= size or unit == "µs":
            return f"{digits(value / size)} {unit}"
    raise AssertionError


def digits(value: float) -> str:
    """A number with three digits."""
    if value == int(value):
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{float(f'{value:.3g}'):g}"


def close(found: Any, expected: Any, within: float = 1e-6) -> bool:
    """Whether two lists of places are equal but for rounding."""
    return len(found) == len(expected) and all(abs(a - b) <= within for a, b in zip(found, expected))
