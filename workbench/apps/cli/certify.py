"""``workbench certify``: compare a simulator's schedules with vLLM's, feature by feature."""

from __future__ import annotations

import argparse
import json

from workbench.apps.cli.options import Commands, add_command, add_out_option, check_folder, say_written
from workbench.apps.cli.say import say

_EXAMPLES = """\
  workbench certify simulator:schedule --out certificate
  workbench certify "node simulator.js" --workloads 500 --features "prefix caching,priority"
  workbench certify "python -m workbench certify --speak workbench"
"""


def add_parser(commands: Commands) -> None:
    """Add ``certify`` to the commands."""
    parser = add_command(
        commands, "certify", run, "tell how much of a simulator's schedules equals vLLM's", examples=_EXAMPLES
    )
    program = "module:function that takes a workload and returns its schedule, or a command that answers JSON lines"
    parser.add_argument("program", nargs="?", metavar="PROGRAM", help=program)
    parser.add_argument("--workloads", type=int, default=100, metavar="N", help="for each feature (default: 100)")
    parser.add_argument("--seed", type=int, metavar="N", help="chooses the workloads (default: others each time)")
    parser.add_argument("--features", metavar="NAME,...", help="features to look at (default: all)")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help="seconds for an answer (default: 60)")
    speak = "instead: answer workloads for a scheduler that `workbench hunt` can drive"
    parser.add_argument("--speak", metavar="SCHEDULER", help=speak)
    add_out_option(parser, "DIR", "folder for the certificate and the pages of the first differences")


def run(options: argparse.Namespace) -> int:
    """Certify; the exit status is 1 if a feature differs.

    Raises:
        ValueError: An option is wrong.
    """
    from workbench.analysis.certify import certify
    from workbench.analysis.certify.speak import speak

    if (options.program is None) == (options.speak is None):
        raise ValueError("give PROGRAM, which is certified, or --speak SCHEDULER, which answers for a scheduler")
    check_folder("--out", options.out)
    if options.speak:
        speak(options.speak)
        return 0
    made = certify(
        options.program,
        workloads=options.workloads,
        seed=options.seed,
        features=[name.strip() for name in options.features.split(",")] if options.features else None,
        timeout=options.timeout,
        out=options.out,
    )
    for line in str(made).splitlines():
        say(line)
    if options.out:
        say_written(options.out, "the certificate")
    print(json.dumps({"certified": made.certified, "seed": made.seed}))
    return 0 if made.certified else 1
