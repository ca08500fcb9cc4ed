"""``workbench trace``: look at trace files from the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.apps.cli import trace_decide, trace_watch
from workbench.apps.cli.options import (
    TRACE_FILE,
    Commands,
    add_command,
    add_out_option,
    add_unit_options,
    add_window_options,
    check_suffix,
    has_units,
    has_window,
    load_trace,
    parts_of,
    place_around,
    say_written,
)
from workbench.apps.cli.say import say, say_text
from workbench.base.text import counted

if TYPE_CHECKING:
    from workbench.simulation.access_log import AccessLog
    from workbench.simulation.request_log import RequestLog
    from workbench.trace import Trace
    from workbench.trace.formats.kv_events import KVEvents
    from workbench.trace.formats.scrapes import Scrapes
    from workbench.trace.formats.server_log import ServerLog

_INFO = """\
  workbench trace info run.jsonl.gz
  workbench trace info run.jsonl.gz --around r1
  workbench trace info access.csv
"""
_NARRATE = "  workbench trace narrate run.jsonl.gz"
_HTML = "  workbench trace html run.jsonl.gz run.html"
_LINK = "  workbench trace link run.jsonl.gz --step 2 --request r1"
_PERFETTO = "  workbench trace perfetto run.jsonl.gz run.perfetto.json"
_OTLP = "  workbench trace otlp run.jsonl.gz --out spans.json"
_DIFF = "  workbench trace diff run.jsonl.gz measured.jsonl"

_KV_EVENTS = """\
  workbench trace kv-events tcp://127.0.0.1:5557 --out events.jsonl --seconds 120
  workbench trace info events.jsonl
"""

_TRACE = '{"kind":"meta"'
"""Beginning of a trace as `encode_line` writes it: the readers of other formats need not look at it."""

_NO_PART = "--from, --to, --last and --around take a part of a trace, and {} is none"


def add_parser(commands: Commands) -> None:
    """Add ``trace`` and its own commands to the command line."""
    trace = commands.add_parser("trace", help="summarise, explain, predict, compare or convert trace files")
    actions = trace.add_subparsers(dest="trace_command", required=True, metavar="COMMAND")

    help = "summarise the contents and latencies of a trace, or of what other tools recorded"
    info = add_command(actions, "info", _info, help, examples=_INFO)
    others = (
        "a folder of them, an access log, OTLP spans, a recording of vllm-vcr, scrapes of /metrics, KV events, or a "
        "server's log"
    )
    info.add_argument("trace", type=Path, help=f"{TRACE_FILE}, {others}")
    add_unit_options(info)

    story = add_command(actions, "narrate", _narrate, "tell every step of a trace in one sentence", examples=_NARRATE)
    story.add_argument("trace", type=Path, help=TRACE_FILE)

    help = "one page that shows the trace, for any browser, without a network"
    html = add_command(actions, "html", _html, help, examples=_HTML)
    html.add_argument("trace", type=Path, help=TRACE_FILE)
    add_out_option(html, "PAGE", "page to write (default: beside the trace, .html)", is_last_word=True)

    help = "print a link that opens the trace in the playground: the trace is in the link, nothing is uploaded"
    link = add_command(actions, "link", _link, help, examples=_LINK)
    link.add_argument("trace", type=Path, help=TRACE_FILE)
    link.add_argument("--step", type=int, metavar="N", help="open it at this step")
    link.add_argument("--request", metavar="ID", help="select this request")
    help = "address of the playground (default: WORKBENCH_PLAYGROUND, else that of workbench playground here)"
    link.add_argument("--playground", metavar="URL", help=help)

    help = "convert to a Chrome trace, which opens in ui.perfetto.dev"
    perfetto = add_command(actions, "perfetto", _perfetto, help, examples=_PERFETTO)
    perfetto.add_argument("trace", type=Path, help=TRACE_FILE)
    help = "a profile of torch's profiler (.json or .json.gz) that ran meanwhile: its events on the same time axis"
    perfetto.add_argument("--join", type=Path, metavar="PROFILE", help=help)
    add_out_option(perfetto, "FILE", "file to write (default: beside the trace, .perfetto.json)", is_last_word=True)

    help = "write requests as OpenTelemetry spans (OTLP/JSON), for other dashboards"
    otlp = add_command(actions, "otlp", _otlp, help, examples=_OTLP)
    otlp.add_argument("trace", type=Path, help=TRACE_FILE)
    help = "file to write (default: beside the trace, .otlp.json)"
    add_out_option(otlp, "FILE", help, is_last_word=True)

    trace_watch.add_parser(actions)

    events = add_command(
        actions, "kv-events", _kv_events, "record the KV cache events of a running vLLM", examples=_KV_EVENTS
    )
    events.add_argument("endpoint", help="address of vLLM's publisher, such as tcp://127.0.0.1:5557")
    add_out_option(events, "FILE", "file to write (.jsonl)", is_last_word=True)
    help = "vLLM's replay_endpoint: begin with the oldest batch it has"
    events.add_argument("--replay", metavar="ENDPOINT", help=help)
    events.add_argument("--topic", default="", help="beginning of the topics to subscribe to (default: all)")
    events.add_argument("--tokens", action="store_true", help="write the token ids of blocks, which are users' texts")
    events.add_argument("--seconds", type=float, metavar="S", help="time to record (default: until Ctrl-C)")

    diff = add_command(actions, "diff", _diff, "compare two traces of the same requests", examples=_DIFF)
    diff.add_argument("a", type=Path, help="trace file")
    diff.add_argument("b", type=Path, help="trace file")

    trace_decide.add_parsers(actions)
    for parser in (info, story, html, link, perfetto, otlp, diff):
        add_window_options(parser)


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name.removesuffix(".gz").removesuffix(".jsonl") + suffix)


def _info(options: argparse.Namespace) -> int:
    is_folder = options.trace.is_dir()
    other = None if is_folder else _read_other(options)
    if other is not None and has_window(options):
        raise ValueError(_NO_PART.format(options.trace))
    if is_folder:
        from workbench.trace.readings.fleet import Fleet

        with Fleet(options.trace) as fleet:
            fleet.traces = parts_of(fleet.traces, options)
            say_text(fleet)
            say_text(fleet.metrics())
            _print_hits(fleet.traces.values())
            for name, trace in fleet.traces.items():
                _print_late(trace, f"{name}: ")
        return 0
    if other is not None:
        say_text(other)
        return 0
    from workbench.trace.readings.metrics_collector import metrics

    trace = load_trace(options.trace, options)
    say(trace)
    say_text(metrics(trace))
    _print_hits([trace])
    _print_late(trace)
    return 0


def _print_hits(traces: Iterable[Trace]) -> None:
    """Print the hits in the prefix cache by depth, adapter, turn and session, of the traces that have one."""
    from workbench.analysis.hit_rates import hit_rates

    if cached := [trace for trace in traces if trace.config.get("enable_prefix_caching")]:
        for line in str(hit_rates(cached)).splitlines():
            say(line)


def _print_late(trace: Trace, start: str = "") -> None:
    """Print the steps that the machine made late, and whether durations follow from the contents of steps."""
    from workbench.analysis.causes import MAX_SLOW, misfit_words
    from workbench.analysis.explain import explainer_of
    from workbench.trace.clock import time_of_day
    from workbench.trace.readings.metrics import amount
    from workbench.trace.readings.recorded_when import recorded_when

    explainer, created = explainer_of(trace), trace.meta.created
    if when := recorded_when(trace):
        say(f"{start}{when}")

    def at(seconds: float) -> str:
        return f" (at {moment})" if (moment := time_of_day(created, seconds)) else ""

    first = trace[0].step if len(trace) else 0  # the explainer of a part reads the run up to its end
    for stall in (each for each in explainer.stalls.values() if each.step >= first):
        say(f"{start}stall: {stall}{at(stall.time)}")
    here = [each for each in explainer.slow.values() if each.step >= first]
    slow = sorted(here, key=lambda step: step.expected - step.seconds)
    if slow:
        lost = amount(sum(step.seconds - step.expected for step in slow), "s")
        say(f"{start}slow: {counted(len(slow), 'step')} lost {lost} against steps like them nearby")
    for step in slow[:MAX_SLOW]:
        say(f"{start}slow: {step}{at(step.time)}")
    if explainer.misfit:
        say(f"{start}{misfit_words(explainer.misfit)}")


def _read_other(options: argparse.Namespace) -> Scrapes | KVEvents | RequestLog | AccessLog | ServerLog | None:
    """The recording of another tool, with the units of an access log; None for a trace."""
    from workbench.trace.text_file import beginning

    if beginning(options.trace, len(_TRACE)) == _TRACE and not has_units(options):
        return None
    from workbench.simulation.access_log import is_access_log, read_log, refuse_units
    from workbench.simulation.request_log import read_request_log
    from workbench.trace.formats.kv_events import is_kv_events, read_kv_events
    from workbench.trace.formats.otlp import is_otlp
    from workbench.trace.formats.scrapes import is_scrapes, read_scrapes
    from workbench.trace.formats.server_log import is_server_log, read_server_log
    from workbench.trace.formats.vcr import is_vcr

    path: Path = options.trace
    is_spans = is_otlp(path) or is_vcr(path)
    is_log = not is_spans and is_server_log(path)  # its lines may be JSON, as those of an access log
    if not is_spans and not is_log and is_access_log(path):
        return read_log(path, options.time_unit, options.block_size, ignore_columns=options.ignore_columns)
    refuse_units(path, options.time_unit, options.block_size, () if is_spans else options.ignore_columns)
    if is_scrapes(path):
        return read_scrapes(path)
    if is_kv_events(path):
        return read_kv_events(path)
    if is_spans:
        return read_request_log(path, options.ignore_columns)
    return read_server_log(path) if is_log else None


def _narrate(options: argparse.Namespace) -> int:
    from workbench.trace.clock import time_of_day
    from workbench.trace.readings.narrate import narrate

    trace = load_trace(options.trace, options)
    for step in trace:
        moment = time_of_day(trace.meta.created, step.time) if step.end else ""
        sentence = narrate(step, trace.requests)
        say(f"{moment}  {sentence}" if moment else sentence)
    return 0


def _html(options: argparse.Namespace) -> int:
    from workbench.viz.export_html import to_html

    if options.trace.is_dir():
        raise ValueError(
            f"{options.trace} is a folder, and a page shows one recording: name a file in it, or serve all with "
            f"workbench trace watch {options.trace}"
        )
    out = options.out or _beside(options.trace, ".html")
    trace = load_trace(options.trace, options)
    to_html(trace, out, opens_at=place_around(trace, options))
    say_written(out)
    return 0


def _link(options: argparse.Namespace) -> int:
    from workbench.viz.link import LOCAL_PLAYGROUND, link_to

    trace, step, request_id = load_trace(options.trace, options), options.step, options.request
    if step is None and (place := place_around(trace, options)) is not None:
        step, request_id = place.step, request_id or place.request
    link = link_to(trace, step=step, request_id=request_id, playground=options.playground)
    print(link)
    if link.startswith(LOCAL_PLAYGROUND):
        print("`workbench playground` opens it: keep that running in another terminal", file=sys.stderr)
    return 0


def _perfetto(options: argparse.Namespace) -> int:
    from workbench.trace.formats.export import to_chrome_trace
    from workbench.trace.formats.profile import join_profile

    out = options.out or _beside(options.trace, ".perfetto.json")
    trace = load_trace(options.trace, options)
    if options.join is None:
        to_chrome_trace(trace, out)
    else:
        say_text(join_profile(trace, options.join, out))
    say_written(out, hint="open it at https://ui.perfetto.dev")
    return 0


def _otlp(options: argparse.Namespace) -> int:
    from workbench.trace.formats.otlp import to_otlp

    out = options.out or _beside(options.trace, ".otlp.json")
    count = to_otlp(load_trace(options.trace, options), out)
    say_written(out, f"{count} spans", "an OpenTelemetry collector reads it with its otlpjsonfile receiver")
    return 0


def _kv_events(options: argparse.Namespace) -> int:
    from workbench.base.field_checks import number
    from workbench.trace.formats.kv_events.subscriber import record_kv_events

    if options.out is None:
        raise ValueError("--out is missing: name the file for the events, such as --out events.jsonl")
    check_suffix("--out", options.out, ".jsonl")
    if options.seconds is not None:
        number("--seconds", options.seconds, 0.0, low_open=True)
    say(f"recording KV events of {options.endpoint} to {options.out} (Ctrl-C ends it)")
    say_text(
        record_kv_events(
            options.endpoint,
            options.out,
            replay_endpoint=options.replay,
            topic=options.topic,
            with_tokens=options.tokens,
            seconds=options.seconds,
        )
    )
    return 0


def _diff(options: argparse.Namespace) -> int:
    from workbench.trace.readings.compare import compare

    say_text(compare(load_trace(options.a, options), load_trace(options.b, options)))
    return 0
