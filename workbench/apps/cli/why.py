"""``workbench why``: nothing runs, why?"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.apps.cli.options import (
    Commands,
    add_command,
    add_number,
    add_window_options,
    has_window,
    load_ranks,
    parts_of,
)
from workbench.apps.cli.say import say_error, say_text
from workbench.base.field_checks import number

if TYPE_CHECKING:
    from workbench.analysis.why_answer import Why
    from workbench.analysis.why_log import WhyLog
    from workbench.analysis.why_metrics import WhyMetrics

_EXAMPLES = """\
  workbench why /var/log/vllm-traces                      the newest run in a folder, growing or not, with all its ranks
  workbench why run.jsonl.gz
  workbench why run.jsonl.gz --to 10m                     what held its requests up then
  workbench why /var/log/vllm-traces --fail-if-stuck      for a probe: exit status 1 if requests are stuck
  workbench why http://127.0.0.1:8000                     from /metrics alone, which says less
  workbench why vllm.log                                  from lines of a log (vLLM, SGLang, llama-server): less still
"""


def add_parser(commands: Commands) -> None:
    """Add ``why`` to the command line."""
    help = "say why requests are not served, whether they ever can be, and the setting that frees them"
    parser = add_command(commands, "why", run, help, examples=_EXAMPLES)
    parser.add_argument("source", help="trace file or folder of one, scrapes of /metrics, a server's log, or its URL")
    add_number(parser, "--seconds", 2.0, "time between two looks at the /metrics of a URL")
    help = "exit with status 1 if requests are stuck, for a probe; bad input has 2"
    parser.add_argument("--fail-if-stuck", action="store_true", help=help)
    add_window_options(parser, "the answer is about the last step of that part")


def run(options: argparse.Namespace) -> int:
    """Print the answers; with --fail-if-stuck the exit status is 1 if one of them says that requests are stuck."""
    number("--seconds", options.seconds, 0.0, low_open=True)
    is_stuck = False
    for name, answer in _answers(options):
        say_text(f"{name}: {answer}" if name else answer)
        is_stuck |= answer.is_stuck
    return 1 if options.fail_if_stuck and is_stuck else 0


def _answers(options: argparse.Namespace) -> Iterator[tuple[str, Why | WhyLog | WhyMetrics]]:
    """The answer for each rank, by its name; "" for a source of one."""
    from workbench.analysis.why import why
    from workbench.analysis.why_log import why_log
    from workbench.analysis.why_metrics import why_metrics
    from workbench.trace import TraceFollower
    from workbench.trace.formats.live_scrapes import fetch_scrapes
    from workbench.trace.formats.scrapes import is_scrapes, read_scrapes
    from workbench.trace.formats.server_log import is_server_log, read_server_log
    from workbench.trace.readings.fleet import Fleet

    path = Path(options.source)
    is_url = options.source.startswith(("http://", "https://"))
    are_scrapes = path.is_file() and is_scrapes(path)
    is_log = path.is_file() and not are_scrapes and is_server_log(path)
    if has_window(options):
        if is_url or are_scrapes or is_log:
            kind = "a log" if is_log else "a server's /metrics"
            raise ValueError(f"--from, --to, --last and --around take a part of a trace, and {path} is {kind}")
        traces = load_ranks(path)
        for name, part in parts_of(traces, options).items():
            yield name, why(traces[name][: part.offset + len(part)])  # what a block holds may be older than the part
    elif is_url:
        yield "", why_metrics(fetch_scrapes(options.source, options.seconds))
    elif is_log:
        yield "", why_log(read_server_log(path))
    elif are_scrapes:
        yield "", why_metrics(read_scrapes(path))
    elif path.is_dir():
        with Fleet(path, whole=False) as fleet:
            if fleet.note:
                say_error(fleet.note)
            for name, trace in fleet.traces.items():
                yield name if len(fleet.traces) > 1 else "", why(trace, fleet.silent[name])
    else:
        follower = TraceFollower(path)
        follower.stop()
        yield "", why(follower.trace, follower.silent)
