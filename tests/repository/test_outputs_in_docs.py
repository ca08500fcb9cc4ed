"""The output that a page shows below a command is that of the command, if its files are in the repository."""

import json
import re
import shlex
import shutil
import textwrap
import time
from pathlib import Path

import pytest

from workbench.apps.cli import main

ROOT = Path(__file__).parents[2]
FOLDERS = (ROOT / "notebooks" / "data", ROOT / "docs" / "data", ROOT / "examples")
FENCED = re.compile(r"^\$ (workbench .*)\n((?:(?!\$ |```).*\n)+)", re.MULTILINE)
INDENTED = re.compile(r"^ {4}(workbench (?:.*\\\n)*.*)\n\n((?: {4}(?!workbench |cd |python ).*\n)+)", re.MULTILINE)
ELSEWHERE = {
    "workbench why /var/log/vllm-traces": "a server's folder",
    "workbench course grade": "the copies of a class",
    "workbench trace perfetto RECORDING.jsonl.gz both.json --join /tmp": "a profile of a GPU",
    "workbench trace info events.jsonl": "events of a server",
}
"""Commands whose files are not in the repository, by their beginnings."""


def shown():
    """Every command of a page with the output below it."""
    for page in [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"]:
        text = page.read_text()
        found = [(command, output.splitlines()) for command, output in FENCED.findall(text)]
        found += [(command, textwrap.dedent(output).splitlines()) for command, output in INDENTED.findall(text)]
        for command, lines in found:
            words = re.sub(r"\\\n *", "", command).strip()
            if not words.startswith(tuple(ELSEWHERE)):
                yield pytest.param(page, words, lines, id=f"{page.name}: {words}")


def described_workload():
    """The workload that docs/fleet.md describes in its text."""
    (generate,) = re.findall(r'`(\{"generate": .*?\})` describes', (ROOT / "docs" / "fleet.md").read_text(), re.DOTALL)
    config = {"max_num_batched_tokens": 512, "num_blocks": 800, "block_size": 16, "max_num_seqs": 32}
    cost_model = {"fixed": 0.005, "per_row": 0.0002, "per_sequence": 0.0005}
    return json.loads(generate) | {"config": config, "cost_model": cost_model}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the repository's files, in which the commands run, at the time of day that pages show."""
    for file in (file for source in FOLDERS for file in source.iterdir() if file.is_file()):
        shutil.copy(file, tmp_path)
    (tmp_path / "workload.json").write_text(json.dumps(described_workload()))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield tmp_path
    monkeypatch.undo()
    time.tzset()


def differs(lines, printed):
    """The first line of a page that is not printed below those before it; "..." stands for any text, or any lines."""
    rest = iter(printed)
    gap = True  # a page may leave out the first lines
    for line in lines:
        if line.strip() == "...":
            gap = True
            continue
        pattern = re.compile(" *" + ".*".join(map(re.escape, line.strip().split("..."))))  # a page may be indented less
        found = any(pattern.fullmatch(each.rstrip()) for each in rest) if gap else pattern.fullmatch(next(rest, "\0"))
        if not found:
            return line
        gap = False
    return None


def test_a_line_that_is_not_printed_is_found():
    printed = ["head", "a  1", "b  2, and more", "c  3"]
    assert differs(["a  1", "b  2, ...", "c  3"], printed) is None is differs(["head", "...", "c  3"], printed)
    assert differs(["a  1", "c  3"], printed) == "c  3" and differs(["...", "a  2"], printed) == "a  2"


@pytest.mark.parametrize(("page", "command", "lines"), shown())
def test_the_output_on_a_page_is_what_the_command_prints(folder, capsys, page, command, lines):
    assert main(shlex.split(command)[1:]) == 0
    printed = capsys.readouterr().out.splitlines()
    missing = differs(lines, printed)
    assert missing is None, f"{page.relative_to(ROOT)} shows, and `{command}` does not print: {missing}"
