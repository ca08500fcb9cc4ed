"""The ``workbench`` command."""

from __future__ import annotations

import argparse
import sys

import workbench


def build_parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    from workbench.bench import add_bench_parser
    from workbench.engine.simulate_cli import add_simulate_parser
    from workbench.kernel_check import add_kernel_parser
    from workbench.serve.cli import add_serve_parser
    from workbench.trace.cli import add_trace_parser

    parser = argparse.ArgumentParser(prog="workbench", description="An LLM inference engine that can be opened.")
    parser.add_argument("--version", action="version", version=f"workbench {workbench.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="a real model serving real requests, with the dashboard")
    demo.add_argument("--port", type=_port, default=5006, help="port of the dashboard on 127.0.0.1 (default 5006)")
    demo.add_argument("--model", default="smollm2", help='"smollm2" (bundled), a GGUF file, a folder or a repository')
    demo.add_argument("--headless", action="store_true", help="no server: print every text and a summary, then exit")
    demo.set_defaults(run=_demo)

    add_simulate_parser(commands)
    add_serve_parser(commands)
    add_trace_parser(commands)
    add_bench_parser(commands)
    add_kernel_parser(commands)
    return parser


def _port(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"{value} is not a port: use 1 to 65535")
    return value


def _demo(options: argparse.Namespace) -> int:
    from workbench.demo import run_headless, run_served

    return run_headless(options.model) if options.headless else run_served(options.model, options.port)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; bad input is one line on standard error and exit status 2."""
    options = build_parser().parse_args(arguments)
    try:
        return options.run(options)
    except (ValueError, OSError) as problem:
        named = isinstance(problem, OSError) and problem.filename
        reason = f"{problem.filename}: {problem.strerror}" if named else problem
        print(f"workbench {options.command}: {reason}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
