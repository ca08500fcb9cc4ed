"""The documentation builds without a warning; names, links, commands and examples work; the English is plain."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import english
import msgspec
import pytest
from link_lines import linked
from msl_runs import skip_without_compiler

from workbench import Engine, EngineConfig, SamplingParams, Trace, simulate
from workbench.apps.cli import main as workbench_command

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
TEXTS = [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
FLAGS = re.MULTILINE | re.DOTALL
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", FLAGS)
FOLDERS = ("workbench", "tests", "notebooks", "scripts", "benchmarks", "docs")
ENGLISH = json.loads((ROOT / "tests/data/translated_english.json").read_text())
"""Samples for the patterns: sentences to be found, sentences to be left alone, and files of every kind."""


def page_name(path):
    return str(path.relative_to(ROOT))


def blocks(path, language):
    return [text for found, text in FENCE.findall(path.read_text()) if found == language]


def prose(path):
    """A page without its code blocks."""
    return FENCE.sub("", path.read_text())


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built into a folder outside of the checkout."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed, so the documentation cannot be built")
    folder = tmp_path_factory.mktemp("docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "site", done.stderr


def test_it_builds_without_a_warning_and_every_page_is_in_the_navigation(site):
    _, log = site
    assert "WARNING" not in log and "not included in the" not in log, log


def test_the_search_of_the_site_finds_no_page_of_solutions(site):
    """Students search; the notes for instructors have the answers, and no link in the navigation."""
    folder, _ = site
    found = {entry["location"] for entry in json.loads((folder / "search" / "search_index.json").read_text())["docs"]}
    assert "teaching/" in found and (folder / "instructors" / "index.html").is_file()
    assert not [location for location in found if location.startswith("instructors/")]


def test_the_search_of_the_site_finds_what_a_button_is_called(site):
    """It prefers titles: in the text alone, a word such as "first" is on ninety pages."""
    folder, _ = site
    docs = json.loads((folder / "search" / "search_index.json").read_text())["docs"]
    assert {"playground/#bet-first"} == {entry["location"] for entry in docs if entry["title"].startswith("Bet first")}


class _Loads(HTMLParser):
    """Collect the addresses that a browser would fetch to show a page."""

    def __init__(self):
        super().__init__()
        self.addresses = []

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        if tag in ("script", "img", "iframe", "source"):
            self.addresses.append(attributes.get("src"))
        if tag == "link" and attributes.get("rel") in ("stylesheet", "icon", "preconnect", "preload"):
            self.addresses.append(attributes.get("href"))


def test_no_page_loads_anything_from_elsewhere(site):
    folder, _ = site
    for page in folder.rglob("*.html"):
        loads = _Loads()
        loads.feed(page.read_text())
        outside = [address for address in loads.addresses if address and re.match(r"(\w+:)?//", address)]
        assert not outside, f"{page.relative_to(folder)} loads {outside}"


@pytest.mark.parametrize("path", TEXTS, ids=page_name)
class TestPage:
    def test_every_file_it_names_is_there(self, path):
        named = re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./*-]*)`", prose(path))
        missing = [name for name in named if not list(ROOT.glob(name.rstrip("/")))]
        assert not missing

    def test_every_relative_link_leads_somewhere(self, path):
        links = re.findall(r"\]\((?!\w+:)([^)#\s]+)", prose(path))
        assert not [link for link in links if not (path.parent / link).exists()]

    def test_its_tables_name_their_columns(self, path):
        """A screen reader says nothing in front of a cell whose column has no name."""
        heads = re.findall(r"^\|(.*)\|\n\|[-:| ]+\|$", prose(path), re.MULTILINE)
        assert not [head for head in heads if not all(name.strip() for name in head.split("|"))]

    def test_every_dotted_name_can_be_imported(self, path):
        """``workbench.a.b.name`` in backticks, with or without a call after it."""
        import pkgutil

        for name in re.findall(r"`(workbench(?:\.\w+)+)[`(]", prose(path)):
            pkgutil.resolve_name(name)

    def test_its_commands_parse(self, path):
        """Every `workbench ...` command in the text exists, and so do its options."""
        text = path.read_text()
        lines = re.findall(r"^(?: {4})?(?:\.venv/bin/)?(workbench (?:.*\\\n)*.*)$", text, re.MULTILINE)
        for line in lines + re.findall(r"`(?:\.venv/bin/)?(workbench [^`]+)`", text):
            words = re.sub(r"\s#.*", "", line.replace("\\\n", " ")).split()
            if "..." in line:
                continue
            for option in [word.split("=")[0] for word in words if word.startswith("--")]:
                assert option in help_of(words[1:]), f"{line!r}: no option {option}"
            assert help_of(words[1:])


@pytest.mark.parametrize("path", PAGES, ids=page_name)
def test_links_into_the_code_lead_to_the_right_lines(path):
    _, wrong = linked(path)
    assert not wrong, "run python scripts/link_lines.py: " + "; ".join(wrong)


def test_a_link_to_another_line_is_put_right(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "workbench").mkdir()
    (tmp_path / "workbench" / "a.py").write_text("class A:\n\n    def f(self): ...\n")
    page = tmp_path / "docs" / "page.md"
    page.write_text("See [`A.f`](../workbench/a.py#L1) and [`A.g`](../workbench/a.py#L1).")
    text, wrong = linked(page)
    assert text == "See [`A.f`](../workbench/a.py#L3) and [`A.g`](../workbench/a.py#L1)."
    assert len(wrong) == 2 and "A.f is at line 3" in wrong[0] and "does not define A.g" in wrong[1]


def help_of(words):
    """The help of a command, and of its first subcommand if it has any."""
    texts = [printed_help(words[0])]
    if re.fullmatch("[a-z-]*[a-z]", " ".join(words[1:2])):
        texts.append(printed_help(*words[:2]))
    return "\n".join(texts)


@cache
def printed_help(*words):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed), pytest.raises(SystemExit):
        workbench_command([*words, "--help"])
    return printed.getvalue()


def paced(trace):
    """The trace with a duration for every step that depends on its contents alone."""
    copy = Trace(trace.meta)
    for info in trace.requests.values():
        copy.add_request(info)
    for record in trace:
        seconds = 0.01 + 0.001 * len(record.chunks) + 0.0001 * record.num_tokens
        time = copy[-1].time + 0.05 if copy else 0.0
        copy.append(msgspec.structs.replace(record, time=time, end=time + seconds, timings={"forward": seconds}))
    return copy


@pytest.fixture
def names(smollm2, tiny_llama, tmp_path, monkeypatch):
    """The names that a page's examples may use without importing them, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORKBENCH_HEADLESS", "1")
    monkeypatch.setattr("workbench.engine.engine.load_model", lambda name: smollm2)
    served = Engine(tiny_llama, EngineConfig(num_blocks=32))
    for prompt in ("w5 w6 w7", "w8 w9"):
        served.add_request(prompt, max_tokens=24)
    served.run(progress=False)
    names = {
        "Engine": Engine,
        "EngineConfig": EngineConfig,
        "SamplingParams": SamplingParams,
        "simulate": simulate,
        "config": EngineConfig(num_blocks=64),
        "workload": {"requests": [{"id": f"r{i}", "prompt": {"len": 40}, "max_tokens": 4} for i in range(3)]},
        "engine": served,
        # With made-up times: a cost model is not fitted to steps that other processes disturbed.
        "trace": paced(served.trace),
    }
    engines = {id(served): served}
    yield names, engines
    for engine in engines.values():
        engine.close()


@pytest.mark.repeats(step=3)
@pytest.mark.parametrize("path", [path for path in PAGES if blocks(path, "python")], ids=page_name)
def test_its_python_runs(path, names):
    """Run the blocks of a page in order. A block followed by an indented ``SomeError: ...`` must raise that error."""
    names, engines = names
    example = r"^```python\n(.*?)^```\n+((?: {4}\w+Error: [^\n]*\n(?: {4}[^\n]*\n)*)?)"
    for code, error in re.findall(example, path.read_text(), FLAGS):
        if "msl." in code:
            skip_without_compiler()
        if "join_group(" in code:  # a program for several ranks, started by a launcher
            compile(code, page_name(path), "exec")
            continue
        if names["engine"].peek_next_batch() == (False, 0):
            names["engine"].add_request([5, 6, 7], max_tokens=8)  # something to do, with any tokenizer
        try:
            exec(compile(code, page_name(path), "exec"), names)
        except Exception as problem:
            assert error, f"{page_name(path)}:\n{code}\nraises {problem!r}"
            assert f"{type(problem).__name__}: {problem}".split() == error.split()
        else:
            assert not error, f"{page_name(path)}:\n{code}\nshould raise {error}"
        finally:
            engines |= {id(value): value for value in names.values() if isinstance(value, Engine)}


@pytest.mark.parametrize("path", [path for path in PAGES if blocks(path, "python")], ids=page_name)
def test_its_python_imports_workbench_before_mlx(path):
    """The other order gives a warning and the slow BLAS."""
    for code in blocks(path, "python"):
        imported = re.findall(r"^(?:import|from) (mlx|workbench)\b", code, re.MULTILINE)
        assert imported[:1] != ["mlx"], f"{page_name(path)}:\n{code}"


@pytest.mark.parametrize("path", [path for path in PAGES if blocks(path, "json")], ids=page_name)
def test_its_json_can_be_read(path):
    for text in blocks(path, "json"):
        json.loads(text)


def room_of(path):
    """The room of a file: a folder of workbench/ or tests/, or a folder or page in the root."""
    parts = path.relative_to(ROOT).parts
    return "/".join(parts[:2]) if parts[0] in ("workbench", "tests") and len(parts) > 2 else parts[0]


@cache
def rooms():
    """The files with prose, by room."""
    found = {}
    for path in [*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*")))]:
        if path.suffix in english.SUFFIXES:
            found.setdefault(room_of(path), []).append(path)
    return found


class TestEnglish:
    """Phrases of translated English; tests/support/english.py lists them."""

    @pytest.mark.parametrize("room", sorted(rooms()))
    def test_a_room_reads_as_if_written_in_english(self, room):
        found = [str(finding) for path in rooms()[room] for finding in english.findings(path, page_name(path))]
        assert not found, "\n".join(["rephrase these:", *found])

    def test_every_pattern_finds_its_sentences_and_leaves_others_alone(self):
        assert ENGLISH["translated"].keys() == english.PATTERNS.keys()
        for pattern, sentences in ENGLISH["translated"].items():
            for sentence in sentences:
                assert pattern in {name for name, _, _ in english.translated(sentence)}, sentence
        for sentence in ENGLISH["fine"]:
            assert not list(english.translated(sentence)), sentence

    @pytest.mark.parametrize("file", ENGLISH["files"], ids=lambda file: file["name"])
    def test_prose_is_found_in_every_kind_of_file(self, tmp_path, file):
        path = tmp_path / file["name"]
        path.write_text(file["source"])
        found = [(finding.line, finding.pattern) for finding in english.findings(path, path.name)]
        assert found == [(file["line"], "goes_on")]
