"""The times that labels of an axis name."""


def seconds_of(words: str) -> float:
    """The time that a label names: "250 ms", "3 s", "2:29 min", "0:30 h" or "1:00:05 h"."""
    value, unit = words.split()
    if ":" in value:
        parts = [float(part) for part in value.split(":")]
        scale = 60 if unit == "h" and len(parts) == 2 else 1
        return scale * sum(part * 60**place for place, part in enumerate(reversed(parts)))
    return float(value.replace(",", "")) * {"s": 1, "ms": 1e-3, "µs": 1e-6}[unit]
