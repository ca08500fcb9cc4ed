"""Units of a log of requests: what its times count, and how many tokens an entry of ``hash_ids`` stands for.

Both follow from the log or are refused: a wrong unit gives plausible nonsense. Published traces differ. Mooncake's has
whole milliseconds and blocks of 512 tokens, Qwen-Bailian's has fractions of seconds and blocks of 16; both name their
columns alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple

from workbench.base.field_checks import FieldError, choice, integer, number
from workbench.base.text import shown, significant
from workbench.trace.fields import MAX_SECONDS

UnitOfTime = Literal["s", "ms", "us", "ns"]

SECONDS: dict[str, float] = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
"""Seconds of each unit."""

UNIT_NAMES = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}

MOONCAKE_BLOCK, BAILIAN_BLOCK = 512, 16
"""Tokens per entry of ``hash_ids`` in the traces of Mooncake and of Qwen-Bailian."""

MAX_BLOCK_SIZE = 2**20

_EPOCH = {unit: (1e9 / seconds, 1e10 / seconds) for unit, seconds in SECONDS.items()}
"""Times since 1970 in each unit, from 2001 to 2286."""

_BAILIAN_KEYS = {"chat_id", "parent_chat_id", "turn"}

_UNITS = {
    **{word: "s" for word in ("s", "sec", "secs", "second", "seconds")},
    **{word: "ms" for word in ("ms", "msec", "msecs", "millis", "millisecond", "milliseconds")},
    **{word: "us" for word in ("us", "usec", "usecs", "micros", "microsecond", "microseconds")},
    **{word: "ns" for word in ("ns", "nsec", "nsecs", "nanos", "nanosecond", "nanoseconds")},
}
"""Words for units at the end of a column's name."""

_UNIT_WORDS = "|".join(_UNITS)

_OFFSET = re.compile(r"\s*(?:(UTC|GMT|Z)|([+-]\d\d:?\d\d))$", re.IGNORECASE)


class Moment(NamedTuple):
    """A time as a log has it.

    Attributes:
        place: Its place in the file, for messages.
        value: The number, or seconds since 1970 of a date.
        kind: "number"; "date" without an offset from UTC, which is taken as UTC; or "zoned" for a date with one.
        is_whole: Whether it is written without a fraction.
        has_point: Whether it is written with a decimal point.
    """

    place: str
    value: float
    kind: str
    is_whole: bool = True
    has_point: bool = False


class TimeUnit(NamedTuple):
    """The unit of a log's times.

    Attributes:
        seconds: Seconds of one.
        words: Its name, and the reason.
    """

    seconds: float
    words: str


def read_moment(place: str, value: Any) -> Moment:
    """A time of a log: a number, or a date such as 2023-11-16 18:15:46.68+02:00.

    Raises:
        ValueError: It is neither.
    """
    if not isinstance(value, str):
        at = number(place, value, 0.0, MAX_SECONDS / SECONDS["ns"])
        return Moment(place, at, "number", at == int(at), isinstance(value, float))
    text = value.strip()
    try:
        at = float(text)
    except ValueError:
        return _read_date(place, text)
    at = number(place, at, 0.0, MAX_SECONDS / SECONDS["ns"])
    return Moment(place, at, "number", at == int(at), "." in text)


def _read_date(place: str, text: str) -> Moment:
    written = text
    if (offset := _OFFSET.search(text)) is not None and ":" in text[: offset.start()]:
        written = text[: offset.start()] + (offset[2] or "+00:00")
    try:
        found = datetime.fromisoformat(written)
        kind = "date" if found.tzinfo is None else "zoned"
        # Of a date without an offset, the machine's own time zone would be a guess.
        at = (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError, OSError):
        raise ValueError(f"{place} must be seconds or a date, got {shown(text)}") from None
    return Moment(place, number(place, at, 0.0, MAX_SECONDS), kind)


def split_unit(column: str) -> tuple[str, str | None]:
    """The name of a column in lower case, with words joined by ``_``, and the unit of time that its end names."""
    name = re.sub(r"[\s\-_]+", "_", column.strip().lower()).strip("_")
    if (end := re.fullmatch(rf"(.+?)_?[(\[]({_UNIT_WORDS})[)\]]|(.+)_({_UNIT_WORDS})", name)) is None:
        return name, None
    return end[1] or end[3], _UNITS[end[2] or end[4]]


def time_unit(
    path: Any,
    moments: Sequence[Moment],
    *,
    given: str | None,
    named: str | None,
    keys: Iterable[str],
    like_mooncake: bool,
    is_table: bool,
    block_sizes: Sequence[int],
) -> TimeUnit:
    """The unit of a log's times.

    Args:
        path: The file, for messages.
        moments: Its times.
        given: The unit that the user gives; None to find it.
        named: The unit that the name of the column says.
        keys: Names of all columns.
        like_mooncake: Whether the columns are named as Mooncake's and Qwen-Bailian's.
        is_table: Whether the file is a table, as neither of them is.
        block_sizes: Numbers of tokens that an entry of ``hash_ids`` can stand for; empty without such entries.

    Raises:
        ValueError: Dates and numbers are mixed, or two readings are possible.
    """
    if given is not None:
        choice("time_unit", given, tuple(SECONDS))
    kinds: dict[str, Moment] = {}
    for moment in moments:
        kinds.setdefault(moment.kind, moment)
    if len(kinds) > 1:
        words = {"number": "a number", "date": "a date without an offset from UTC", "zoned": "a date with an offset"}
        first, second, *_ = (f"{moment.place} has {words[kind]}" for kind, moment in kinds.items())
        raise ValueError(f"{first}, and {second}: write all times in the same way")
    if "number" not in kinds:
        if given is not None:
            raise FieldError(f"time_unit {given!r} has no effect on {path}, whose times are dates: leave it out")
        return TimeUnit(1.0, "dates" if "zoned" in kinds else "dates without an offset, read as UTC")
    if given is not None:
        return TimeUnit(SECONDS[given], f"{UNIT_NAMES[given]}, as given")
    if named is not None:
        return TimeUnit(SECONDS[named], f"{UNIT_NAMES[named]}, as the column's name says")
    low, high = min(moment.value for moment in moments), max(moment.value for moment in moments)
    if (unit := _epoch_unit(path, low, high)) is not None:
        return TimeUnit(SECONDS[unit], f"{UNIT_NAMES[unit]} since 1970")
    if all(_is_like_a_date(moment) for moment in moments):
        raise ValueError(
            f"{path}: its times can be seconds, or dates such as {moments[0].value:.0f} without separators: give "
            "--time-unit s (time_unit in Python), or write 2023-11-16"
        )
    if not like_mooncake:
        return TimeUnit(1.0, UNIT_NAMES["s"])
    if low == high:  # all requests arrive together in any unit
        return TimeUnit(1.0, "all the same")
    if _BAILIAN_KEYS & set(keys):
        return TimeUnit(1.0, "seconds, as in Qwen-Bailian's traces")
    can_be_mooncake = not is_table and all(moment.is_whole for moment in moments)
    if can_be_mooncake and (not block_sizes or list(block_sizes) == [MOONCAKE_BLOCK]):
        return TimeUnit(SECONDS["ms"], "milliseconds, as in Mooncake's traces")
    if list(block_sizes) == [BAILIAN_BLOCK] and any(moment.has_point for moment in moments):
        return TimeUnit(1.0, "seconds, as in Qwen-Bailian's traces")
    raise _two_units(path, len(moments), high - low, "s", "ms")


def _is_like_a_date(moment: Moment) -> bool:
    """Whether a number is a date of 1970 to 2099 as YYYYMMDD."""
    if not (moment.is_whole and 19_700_101 <= moment.value <= 20_991_231):
        return False
    try:
        datetime.strptime(f"{moment.value:.0f}", "%Y%m%d")
    except ValueError:
        return False
    return True


def _epoch_unit(path: Any, low: float, high: float) -> str | None:
    """The unit of times since 1970; None for times since the start.

    Raises:
        ValueError: Times since the start reach so far that they cannot be seconds.
    """
    for unit, (start, end) in _EPOCH.items():
        if start <= low and high < end:
            return unit
    if high >= _EPOCH["s"][0]:
        if low >= _EPOCH["s"][0]:
            raise ValueError(
                f"{path}: its times go from {low:.15g} to {high:.15g}, and no unit makes both times since 1970: give "
                "--time-unit s, ms, us or ns (time_unit in Python)"
            )
        raise _two_units(path, 0, high - low, "ms", "us")
    return None


def _two_units(path: Any, num_requests: int, span: float, *units: str) -> ValueError:
    readings = []
    for unit in units:
        seconds = span * SECONDS[unit]
        rate = f", {significant(num_requests / seconds, 4)} requests per second" if num_requests and seconds else ""
        readings.append(f"{UNIT_NAMES[unit]} (a span of {significant(seconds, 6)} s{rate})")
    options = " or ".join(f"--time-unit {unit}" for unit in units)
    return ValueError(f"{path}: its times can be {' or '.join(readings)}: give {options} (time_unit in Python)")


# -- block sizes -------------------------------------------------------------------------------------------------------


class BlockRange(NamedTuple):
    """The block sizes from ``low`` to ``high`` tokens; ``high`` is None if there is no end."""

    low: int
    high: int | None

    @classmethod
    def of(cls, length: int, num_blocks: int, *, counts_rest: bool) -> BlockRange:
        """The sizes with which a prompt has so many blocks, if its last, incomplete block counts, or does not."""
        if counts_rest:
            return cls(-(-length // num_blocks), None if num_blocks == 1 else (length - 1) // (num_blocks - 1))
        return cls(length // (num_blocks + 1) + 1, length // num_blocks)

    def common(self, other: BlockRange) -> BlockRange:
        """The sizes in both."""
        ends = [each for each in (self.high, other.high) if each is not None]
        return BlockRange(max(self.low, other.low), min(ends) if ends else None)

    def sizes(self) -> list[int]:
        """The powers of two in it, or else a single size."""
        high = MAX_BLOCK_SIZE if self.high is None else min(self.high, MAX_BLOCK_SIZE)
        powers = [size for power in range(MAX_BLOCK_SIZE.bit_length()) if self.low <= (size := 2**power) <= high]
        return powers or ([self.low] if self.low == high else [])

    def holds(self, size: int) -> bool:
        """Whether a size is in it."""
        return self.low <= size and (self.high is None or size <= self.high)


class Hashed(NamedTuple):
    """A prompt whose blocks have names.

    Attributes:
        place: Its place in the file, for messages.
        length: Number of its tokens.
        blocks: The names.
    """

    place: str
    length: int
    blocks: Sequence[int]


def block_sizes(path: Any, prompts: Iterable[Hashed], given: int | None) -> list[int]:
    """The numbers of tokens that a name can stand for; empty if no prompt has names.

    Raises:
        ValueError: No size fits all prompts, or the given one does not; the message names a line.
    """
    if given is not None:
        integer("block_size", given, 1, MAX_BLOCK_SIZE)
    counted = [prompt for prompt in prompts if prompt.blocks]
    if not counted:
        return []
    problem = ""
    for counts_rest in (True, False):
        common = BlockRange(1, None)
        for place, length, blocks in counted:
            fits = BlockRange.of(length, len(blocks), counts_rest=counts_rest)
            if given is not None and not fits.holds(given):
                common, reason = BlockRange(2, 1), f"blocks of {given} tokens do not fit it"
            else:
                common, reason = common.common(fits), "no block size fits both it and the lines before it"
            if common.high is not None and common.low > common.high:
                problem = problem or f"{place} input_length is {length}, with {len(blocks)} hash_ids: {reason}"
                break
        else:
            if given is not None:
                return [given]
            if sizes := common.sizes():
                return sizes
            problem = problem or (
                f"{path}: its hash_ids can stand for {common.low} to {common.high} tokens each: give --block-size N "
                "(block_size in Python)"
            )
    raise ValueError(problem)


def single_block_size(path: Any, prompts: Iterable[Hashed], sizes: Sequence[int]) -> int | None:
    """The number of tokens that a name stands for; None if that makes no difference, because no prefix is shared.

    Raises:
        ValueError: Several sizes are possible, and prompts share prefixes.
    """
    if len(sizes) < 2:
        return sizes[0] if sizes else None
    first = [prompt.blocks[0] for prompt in prompts if prompt.blocks]
    if len(set(first)) == len(first):
        return None
    known: Mapping[int, str] = {BAILIAN_BLOCK: " (Qwen-Bailian's)", MOONCAKE_BLOCK: " (Mooncake's)"}
    named = [size for size in sizes if size in known] or list(sizes[:2])
    if len(named) < 2:
        named = sorted({*named, *sizes[:2]})
    words = " or ".join(f"{size}{known.get(size, '')}" for size in named)
    options = " or ".join(f"--block-size {size}" for size in named)
    raise ValueError(
        f"{path}: its hash_ids can stand for {words} tokens each, as every prompt is short: give {options} "
        "(block_size in Python)"
    )
