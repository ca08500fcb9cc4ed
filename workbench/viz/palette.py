"""The colours of all views and their meanings. No colour is chosen anywhere else.

One rule holds in every plot: **a hue means a request; nothing else has a hue, except events.** At most six requests
that run together are in focus and have a hue (``js/hues.js`` gives it), and those asked for in this view have another
one; the others are grey and identified by their labels. The fill of a chunk shows its phase: prefill is solid, decode
light with a dot, recomputed tokens hatched.

The focus hues are the Okabe-Ito set without yellow and black (Okabe and Ito, "Color Universal Design", 2008);
``tests/viz/test_viz_palette.py`` computes their differences for three kinds of colour vision deficiency.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

FOCUS_HUES: tuple[str, ...] = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
"""Hues of the requests in focus, by slot. Two of them are pale on white, so marks have a thin dark outline."""

OWN_HUE = "#9900FF"
"""Hue of what was asked for in a view itself: the colour farthest from all others, whatever the colour vision."""

EVENT_MARKS: dict[str, tuple[str, str]] = {
    "arrive": ("bar", "#6B7280"),
    "admit": ("up", "#0072B2"),
    "resume": ("half", "#56B4E9"),
    "preempt": ("down", "#D55E00"),
    "finish": ("square", "#4D4D4D"),
    "abort": ("cross", "#4D4D4D"),
    "stall": ("line", "#D55E00"),
}
"""Shape and colour of each kind of event, and of a stall. The shapes alone distinguish them; the colours only help."""


ACTION_MARKS: dict[str, tuple[str, str, str]] = {
    "load": ("L", "#56B4E9", "loads"),
    "store": ("S", "#E69F00", "stores"),
    "atomic": ("A", "#CC79A7", "atomic access"),
    "simd": ("Σ", "#009E73", "simd function or matrix product"),
    "compute": ("=", "#0072B2", "watched value"),
    "waits": ("‖", "muted", "waits at the barrier"),
    "passed": ("▷", "cached", "passes the barrier"),
    "diverged": ("×", "free", "diverged: other lanes act"),
    "elsewhere": ("", "kv", "not its turn"),
    "returned": ("–", "hairline", "returned"),
    "fault": ("!", "bad", "fault"),
}
"""Letter, colour (or role in a theme) and words of what a lane does in the page of a recorded kernel. No request is in
it, so a hue means an action there; the letters alone distinguish them."""


@dataclass(frozen=True)
class Theme:
    """Colours of one theme, by role; the defaults are those of the light theme.

    Attributes:
        background: Page and canvas background.
        surface: Background of raised parts: header, tooltips, buttons.
        text: Primary text.
        muted: Axis labels and secondary text (at least 4.5:1 on ``background``).
        hairline: Grid lines and borders.
        prefill: Prefill tokens of requests without a hue.
        decode: Decode tokens of requests without a hue.
        kv: KV that is in the cache already.
        free: A free block.
        cached: A free block whose content the prefix cache can still find.
        owned: A block that a request without a hue uses.
        outline: Thin outline of marks, and of changes in this step.
        cursor: The cursor line and the keyboard focus ring.
        good: Confirmation (equal tokens, connected).
        bad: Rejection, error, difference.
    """

    background: str = "#FFFFFF"
    surface: str = "#F6F7F9"
    text: str = "#1A1D21"
    muted: str = "#5C6470"
    hairline: str = "#E2E5EA"
    prefill: str = "#4A5361"
    decode: str = "#B4BBC6"
    kv: str = "#DDE0E6"
    free: str = "#FFFFFF"
    cached: str = "#D9D9D9"
    owned: str = "#8B929C"
    outline: str = "#1A1D21"
    cursor: str = "#B3005E"
    good: str = "#00704F"
    bad: str = "#B3261E"


LIGHT = Theme()
DARK = Theme(
    background="#16181C",
    surface="#1F2227",
    text="#ECEEF1",
    muted="#9BA3AF",
    hairline="#343941",
    prefill="#B9C1CD",
    decode="#636C79",
    kv="#343A43",
    free="#16181C",
    cached="#3F444C",
    owned="#7B838F",
    outline="#F4F6F8",
    cursor="#FF6FB5",
    good="#3FC79A",
    bad="#FF8A80",
)


def mix(colour: str, other: str, share: float) -> str:
    """An opaque mixture of two ``#RRGGBB`` colours; ``share`` in [0, 1] is the share of ``other``.

    The light fill of decodes is a mixture because transparent marks would look darker when they overlap.
    """
    parts = zip(bytes.fromhex(colour[1:]), bytes.fromhex(other[1:]))
    return "#" + bytes(round(a + (b - a) * share) for a, b in parts).hex().upper()


def luminance(colour: str) -> float:
    """Relative luminance of a ``#RRGGBB`` colour in [0, 1], as WCAG 2.2 defines it."""
    parts = [value / 255 for value in bytes.fromhex(colour[1:])]
    red, green, blue = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def ink_on(colour: str) -> str:
    """The colour of text on a fill: dark or white, the one with the higher contrast."""
    light = luminance(colour)
    return "#FFFFFF" if 1.05 / (light + 0.05) > (light + 0.05) / (luminance("#111418") + 0.05) else "#111418"


def as_dict() -> dict[str, object]:
    """All colours as plain data, for the ES modules."""
    return {
        "focus": list(FOCUS_HUES),
        "own": OWN_HUE,
        "actions": {action: list(mark) for action, mark in ACTION_MARKS.items()},
        "events": {kind: list(mark) for kind, mark in EVENT_MARKS.items()},
        "light": asdict(LIGHT),
        "dark": asdict(DARK),
    }
