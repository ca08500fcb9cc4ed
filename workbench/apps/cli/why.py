"""``workbench why``: nothing runs, why?"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from workbench.apps.cli.options import (
    Commands,
    add_command,
    add_number,
    add_window_options,
    has_window,
    load_ranks,
    parts_of,
)
from workbench.base.field_checks import number

_EXAMPLES = """\
  workbench why /var/log/vllm-traces                      the newest run in a folder, growing or not, with all its ranks
  workbench why run.jsonl.gz
  workbench why run.jsonl.gz --to 10m                     what held its requests up then
  workbench why http://127.0.0.1:8000                     from /metrics alone, which says less
  workbench why vllm.log                                  from lines of a log (vLLM, SGLang, llama-server): less still
"""


def add_parser(commands: Commands) -> None:
    """Add ``why`` to the command line."""
    help = "say why requests are not served, whether they ever can be, and the setting that frees them"
    parser = add_command(commands, "why", run, help, examples=_EXAMPLES)
    parser.add_argument("source", help="trace file or folder of one, scrapes of /metrics, a server's log, or its URL")
    add_number(parser, "--seconds", 2.0, "time between two looks at the /metrics of a URL")
    add_window_options(parser, "the answer is about the last step of that part")


def run(options: argparse.Namespace) -> int:
    """Print the answer."""
    from workbench.analysis.why import why
    from workbench.analysis.why_log import why_log
    from workbench.analysis.why_metrics import why_metrics
    from workbench.trace import TraceFollower
    from workbench.trace.formats.scrapes import fetch_scrapes, is_scrapes, read_scrapes
    from workbench.trace.formats.server_log import is_server_log, read_server_log

    number("--seconds", options.seconds, 0.0, low_open=True)
    path = Path(options.source)
    is_log = path.is_file() and not is_scrapes(path) and is_server_log(path)
    if has_window(options):
        if is_log:
            raise ValueError(f"--from, --to, --last and --around take a part of a trace, and {path} is a log")
        traces = load_ranks(Path(options.source))
        for name, part in parts_of(traces, options).items():
            answer = why(traces[name][: part.offset + len(part)])  # what a block holds may be older than the part
            print(f"{name}: {answer}" if name else answer)
        return 0
    if options.source.startswith(("http://", "https://")):
        print(why_metrics(fetch_scrapes(options.source, options.seconds)))
        return 0
    if is_log:
        print(why_log(read_server_log(path)))
        return 0
    if not path.is_dir() and is_scrapes(path):
        print(why_metrics(read_scrapes(path)))
        return 0
    if path.is_dir():
        ranks = load_ranks(path)
        if len(ranks) > 1:
            for name, trace in ranks.items():
                print(f"{name}: {why(trace)}")
            return 0
    follower = TraceFollower(path)
    follower.stop()
    print(why(follower.trace))
    if not follower.trace.end:
        written = time.time() - follower.path.stat().st_mtime
        print(f"the recording has no end; {follower.path.name} was last written {written:.0f} s ago")
    return 0
