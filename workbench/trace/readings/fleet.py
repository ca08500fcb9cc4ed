"""A folder of recordings: the data-parallel ranks of a server, or several servers, each with its own scheduler."""

from __future__ import annotations

import logging
import os
import re
import threading
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from workbench.base.tables import table_lines, terminal_width, wrapped
from workbench.base.text import counted, printable
from workbench.trace.errors import TraceError
from workbench.trace.follower import POLL_SECONDS, TraceFollower, trace_files_in
from workbench.trace.readings.metrics import TraceMetrics, number, percent
from workbench.trace.readings.metrics_collector import merge_metrics, metrics
from workbench.trace.run_zero import seconds_late
from workbench.trace.trace import Trace

log = logging.getLogger("workbench")

START_SECONDS = 60.0
"""Maximum time between the starts of two ranks of one server."""

_FILE = re.compile(r"(?P<recording>.*?)(?:-(?P<number>\d{5}))?\.jsonl(?:\.gz)?")
MAX_NAMED = 5
"""Maximum number of recordings that a sentence names."""

_RECORDER = re.compile(r"(?:vllm|sglang)-\d{8}-\d{6}-(?P<host>.+)-rank(?P<rank>\d+)-\d+-\d+")


class RecordingFiles(NamedTuple):
    """The files of one scheduler's recording.

    Attributes:
        prefix: The part of the file names that they share.
        host: Name of the machine; "" if no recorder named the files.
        rank: Data-parallel rank; 0 if the names do not say.
        paths: The files that are left, the oldest first.
    """

    prefix: str
    host: str
    rank: int
    paths: tuple[Path, ...]


def find_recordings(folder: str | os.PathLike[str]) -> list[RecordingFiles]:
    """All recordings in a folder, by rank and host.

    Raises:
        TraceError: The folder holds no trace file.
    """
    found: defaultdict[str, list[tuple[int, Path]]] = defaultdict(list)
    for path in trace_files_in(Path(folder)):
        match = _FILE.fullmatch(path.name)
        assert match is not None  # by the ending of the file's name
        found[match["recording"]].append((int(match["number"] or 0), path))
    recordings = []
    for prefix, numbered in found.items():
        paths = tuple(path for _, path in sorted(numbered))
        named = _RECORDER.fullmatch(prefix)
        host, rank = (named["host"], int(named["rank"])) if named else ("", 0)
        recordings.append(RecordingFiles(prefix, host, rank, paths))
    return sorted(recordings, key=lambda recording: (recording.rank, recording.host, recording.prefix))


class Fleet:
    """The traces of the newest run in a folder: one for each rank, by name.

    A server's recording that had ended before another one began belongs to an earlier run and is left out; a file that
    no recorder named stays. Ranks that begin to record later are added by ``poll``.

    Args:
        folder: Folder of the recordings.
        whole: Read every file that is left of a recording; if False, begin with its newest file.

    Attributes:
        folder: Folder of the recordings.
        traces: The traces by name: "rank 0", with the host where two hosts have the same rank.
        left_out: The recordings of earlier runs, by the beginning of their files' names.

    Raises:
        TraceError: The folder holds no trace file.
        OSError: A file cannot be read.

    Example:
        >>> from workbench import simulate
        >>> _ = Path("run").mkdir()
        >>> for rank in (0, 1):
        ...     requests = [{"id": f"request-{rank}", "prompt": {"len": 20}, "max_tokens": 2}]
        ...     simulate({"requests": requests}).save(f"run/vllm-20260101-120000-host-rank{rank}-7-0-00000.jsonl")
        >>> fleet = Fleet("run")
        >>> list(fleet.traces), fleet.metrics().summary.num_output_tokens
        (['rank 0', 'rank 1'], 4)
    """

    def __init__(self, folder: str | os.PathLike[str], *, whole: bool = True) -> None:
        self.folder = Path(folder)
        self.traces: dict[str, Trace] = {}
        self.left_out: list[str] = []
        self._whole = whole
        self._followers: dict[str, TraceFollower] = {}
        self._named: dict[str, TraceFollower] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._add_new()

    def poll(self) -> None:
        """Read what was written since the last time, also by ranks that were not there yet.

        A rank whose file contradicts itself keeps what was read, and a warning says so.
        """
        self._add_new()
        for follower in self._followers.values():
            if not follower.problem:
                try:
                    follower.poll()
                except (TraceError, OSError) as problem:
                    follower.problem = str(problem)
                    log.warning("stopped following %s: %s", follower.path, problem)

    def start(self) -> None:
        """Keep polling on a background thread, until ``close``."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="workbench-fleet", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(POLL_SECONDS):
            try:
                self.poll()
            except (TraceError, OSError) as problem:  # the folder itself
                log.warning("stopped following %s: %s", self.folder, problem)
                return

    def close(self) -> None:
        """End the thread and close the files."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        for follower in self._followers.values():
            follower.stop()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, where: TracebackType | None) -> None:
        self.close()

    def _add_new(self) -> None:
        recordings = {files.prefix: files for files in find_recordings(self.folder)}
        problem = ""
        for prefix in recordings.keys() - self._followers.keys():
            try:
                self._followers[prefix] = TraceFollower(recordings[prefix].paths[0 if self._whole else -1])
            except TraceError as error:  # perhaps a file that has just been made
                problem = str(error)
        if not self._followers:
            raise TraceError(problem)
        known = [files for files in recordings.values() if files.prefix in self._followers]
        kept = [files for files in known if not self._is_of_earlier_run(files, known)]
        self.left_out = [files.prefix for files in known if files not in kept]
        self._named = {name: self._followers[files.prefix] for name, files in zip(_names(kept), kept, strict=True)}
        self.traces = {name: follower.trace for name, follower in self._named.items()}

    def _is_of_earlier_run(self, files: RecordingFiles, recordings: Sequence[RecordingFiles]) -> bool:
        """Whether another recording began after this one had ended; ranks of one server start a little apart."""
        trace = self._followers[files.prefix].trace
        if not trace.meta.created:
            return False
        ended = trace.meta.created + (trace[-1].end if len(trace) else 0.0)  # a copy of a file has another time
        for other in recordings:
            is_same = (other.host, other.rank) == (files.host, files.rank)
            began = self._followers[other.prefix].trace.meta.created
            if files.host and other.host and other is not files and began - (0 if is_same else START_SECONDS) > ended:
                return True
        return False

    @property
    def note(self) -> str:
        """The recordings that are left out, and the reason; "" for none."""
        if not (number := len(self.left_out)):
            return ""
        more = f" and {number - MAX_NAMED} more" if number > MAX_NAMED else ""
        names = ", ".join(map(printable, self.left_out[:MAX_NAMED]))
        it = "it" if number == 1 else "they"
        return (
            f"the newest run alone: {counted(number, 'recording')} left out, because {it} had ended before it began: "
            f"{names}{more}; give the path of a file to read it"
        )

    @property
    def silent(self) -> dict[str, float | None]:
        """For each rank the seconds since its file was last written; None if it has an end line."""
        return {name: follower.silent for name, follower in self._named.items()}

    # -- together ---------------------------------------------------------------------------------------------------

    def metrics(self) -> TraceMetrics:
        """The metrics of all ranks together, on the clock of the one that started first.

        Throughputs are sums, latencies those of all requests, and mean uses are means over the steps of all ranks.
        Requests are named ``rank 0/id``.
        """
        late = seconds_late(self.traces)
        return merge_metrics({name: (metrics(trace), late[name]) for name, trace in self.traces.items()})

    def __repr__(self) -> str:
        rows = {name: metrics(trace).summary for name, trace in self.traces.items()}
        rows["together"] = self.metrics().summary
        table = [["", *(title for title, _ in _COLUMNS)]]
        table += [[name, *(cell(summary) for _, cell in _COLUMNS)] for name, summary in rows.items()]
        width = terminal_width()
        lines = [f"{counted(len(self.traces), 'recording')} in {self.folder}", *([self.note] if self.note else [])]
        lines = [piece for line in lines for piece in wrapped(line, width)]
        lines += table_lines(table, width=width, left=(0,))
        if any(summary.has_idle for summary in rows.values()):
            lines.append("output tokens/s are without idle time")
        if len(servers := by_settings(self.traces)) > 1:
            different = "; ".join(", ".join(names) for names in servers)
            lines.append(f"{len(servers)} servers with different settings ({different}): their sum is of no server")
        return "\n".join(lines)


def by_settings(traces: Mapping[str, Trace]) -> list[list[str]]:
    """The names of recordings, in groups with equal settings: those of one server, or of servers like it."""
    groups: dict[str, list[str]] = {}
    for name, trace in traces.items():
        settings = {key: value for key, value in trace.config.items() if key != "data_parallel_size"}
        groups.setdefault(repr(sorted(settings.items(), key=str)), []).append(name)
    return list(groups.values())


_COLUMNS = (
    ("steps", lambda summary: f"{summary.num_steps:,}"),
    ("requests", lambda summary: f"{summary.num_requests:,}"),
    ("ended", lambda summary: f"{summary.num_finished:,}"),
    ("output tokens/s", lambda summary: number(summary.rates[0] if summary.unit == "s" else None)),
    ("preemptions", lambda summary: f"{summary.num_preemptions:,}"),
    ("KV peak", lambda summary: percent(summary.peak_kv_use)),
    ("TTFT mean", lambda summary: summary.ttft.amount("mean")),
    ("TTFT p99", lambda summary: summary.ttft.amount("p99")),
    ("ITL mean", lambda summary: summary.itl.amount("mean")),
    ("ITL p99", lambda summary: summary.itl.amount("p99")),
)
"""Columns of the table: title, and the text of a cell."""


def _names(recordings: list[RecordingFiles]) -> list[str]:
    ranks = Counter(files.rank for files in recordings)
    places = Counter((files.host, files.rank) for files in recordings)
    return [
        files.prefix
        if not files.host or places[files.host, files.rank] > 1
        else f"rank {files.rank}" + (f" on {files.host}" if ranks[files.rank] > 1 else "")
        for files in recordings
    ]
