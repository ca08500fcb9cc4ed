"""Install a wheel or sdist with each extra into an empty environment, and run what the README and the pages promise.

    python scripts/check_package.py PACKAGE [EXTRA ...] [--installer uv | pip]

Nothing of the repository is imported: environments, home and cache folders are new, and commands run in an empty
folder. The first line that fails ends the script with exit status 1. `base` stands for no extra. Without EXTRA all are
tried but `cuda`, which needs a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

QUICK_START = """
from workbench import Engine, EngineConfig, SamplingParams

engine = Engine("smollm2", EngineConfig(max_num_batched_tokens=64, num_blocks=128))
engine.add_request("The capital of France is", SamplingParams(max_tokens=8))
step = engine.step()
print(step.chunks[0].arm, step.cu_seqlens_q, step.block_tables)
print(engine.run(progress=False)[0].text)
engine.close()
"""

OPENAI = """
import sys
from openai import OpenAI

client = OpenAI(base_url=sys.argv[1] + "/v1", api_key="none", timeout=300)
question = [{"role": "user", "content": "What is the capital of France?"}]
stream = client.chat.completions.create(model="smollm2", messages=question, temperature=0, max_tokens=20, stream=True)
print("".join(piece.choices[0].delta.content or "" for piece in stream if piece.choices))
"""

WORKLOAD = """{"config": {"max_num_batched_tokens": 64}, "cost_model": {"fixed": 0.01},
 "requests": [{"id": "a", "prompt": {"len": 150}, "max_tokens": 30}, {"id": "b", "prompt": {"len": 40}}]}"""

NOTEBOOK = """
import nbformat
from nbclient import NotebookClient

notebook = nbformat.read("course/01_packed_prefill.ipynb", as_version=4)
NotebookClient(notebook, timeout=300, resources={"metadata": {"path": "course"}}).execute()
shown = [output.output_type for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
print("displayed:", shown.count("display_data") + shown.count("execute_result"))
"""

Line = tuple[tuple[str, ...], str]
"""A command of the environment, and a regular expression that its output contains."""

LINES: dict[str, list[Line]] = {
    "base": [
        (("workbench", "--version"), r"0\.\d"),
        (("workbench", "simulate", "workload.json", "--out", "run.jsonl"), "2 of 2 requests ended"),
        (("workbench", "trace", "explain", "run.jsonl"), "waiting for"),
        (("workbench", "trace", "html", "run.jsonl", "page.html"), r"wrote page\.html"),
        (("workbench", "notebooks", "course"), "the course is in course"),
    ],
    "engine": [(("python", "-c", QUICK_START), r"new_final \[0, 5\] \{'r0': \[1\]\}\n Paris\.")],
    "notebook": [
        (("workbench", "notebooks", "course"), "the course is in course"),
        (("python", "-c", NOTEBOOK), "displayed: [1-9]"),
    ],
    "serve": [(("workbench", "demo", "--headless"), "step")],
    "hunt": [(("workbench", "hunt", "--for", "10s", "--out", "found"), "")],
    "msl": [(("workbench", "kernel", "check"), "")],
    "completion": [(("workbench", "completion", "bash"), "_ARGCOMPLETE")],
    "docs": [(("mkdocs", "--version"), "mkdocs")],
    "test": [(("pytest", "--version"), "pytest")],
}


class Environment:
    """An empty environment with the package and one extra, and an empty folder and home to run in."""

    def __init__(self, folder: Path, package: Path, extra: str, installer: str) -> None:
        self.folder = folder / extra
        self.home = folder / "home"  # the bundled model is downloaded once
        self.home.mkdir(exist_ok=True)
        subprocess.run([sys.executable, "-m", "venv", str(self.folder / "env")], check=True)
        (self.folder / "workload.json").write_text(WORKLOAD)
        wanted = [str(package) + ("" if extra == "base" else f"[{extra}]")]
        wanted += ["openai"] if extra == "serve" else []
        install = ["python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        if installer == "uv":
            self.run(*install, "uv")
            install = ["uv", "pip", "install", "--quiet", "--python", str(self.folder / "env")]
        self.run(*install, *wanted)

    @property
    def variables(self) -> dict[str, str]:
        """The environment's variables: none of Python's or of Workbench's own."""
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "WORKBENCH", "XDG"))
        }
        return {**kept, "HOME": str(self.home), "PATH": f"{self.folder}/env/bin{os.pathsep}{os.environ['PATH']}"}

    def run(self, *command: str, shows: str = "") -> None:
        """Run a command of the environment; SystemExit if it fails or its output lacks ``shows``."""
        began = time.monotonic()
        program = str(self.folder / "env/bin" / command[0])
        done = subprocess.run(
            [program, *command[1:]], cwd=self.folder, env=self.variables, capture_output=True, text=True, timeout=1200
        )
        output = done.stdout + done.stderr
        label = " ".join(part if "\n" not in part else f"({len(part.splitlines())} lines)" for part in command)
        if done.returncode or not re.search(shows, output):
            raise SystemExit(f"failed ({done.returncode}; expected {shows!r}): {label}\n{output}")
        print(f"  {time.monotonic() - began:6.1f} s  {label}", flush=True)

    @contextlib.contextmanager
    def serving(self, *command: str) -> Iterator[str]:
        """The address of a server, which ends with the block; SystemExit if none is printed."""
        server = subprocess.Popen(
            [self.folder / "env/bin" / command[0], *command[1:]],
            cwd=self.folder,
            env=self.variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            assert server.stdout is not None
            lines: list[str] = []
            for line in server.stdout:
                lines.append(line)
                if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                    yield found[0]
                    return
            raise SystemExit(f"failed: {' '.join(command)} prints no address\n{''.join(lines)}")
        finally:
            server.terminate()
            server.wait(60)


def check(folder: Path, package: Path, extra: str, installer: str) -> None:
    """Install one extra and run its lines; SystemExit at the first failure."""
    print(f"{extra}:", flush=True)
    environment = Environment(folder, package, extra, installer)
    for command, shows in LINES[extra]:
        environment.run(*command, shows=shows)
    if extra == "serve":
        with environment.serving("workbench", "serve", "--port", "0") as address:
            environment.run("python", "-c", OPENAI, address, shows="Paris")
    if extra == "base":
        with environment.serving("workbench", "playground", "--no-browser", "--port", "0") as address:
            page = urllib.request.urlopen(address, timeout=60).read()  # noqa: S310
        print(f"          the playground's page has {len(page):,} bytes", flush=True)


def main(arguments: list[str] | None = None) -> None:
    """The script."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("package", type=Path)
    parser.add_argument("extras", nargs="*", metavar="EXTRA", help=", ".join(LINES))
    parser.add_argument("--installer", choices=("uv", "pip"), default="uv")
    given = parser.parse_args(arguments)
    if unknown := set(given.extras) - set(LINES):
        parser.error(f"EXTRA {', '.join(sorted(unknown))} is none of {', '.join(LINES)}")
    with tempfile.TemporaryDirectory() as folder:
        for extra in given.extras or LINES:
            check(Path(folder), given.package.resolve(), extra, given.installer)


if __name__ == "__main__":
    main()
