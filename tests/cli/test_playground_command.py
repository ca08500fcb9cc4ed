"""``workbench playground``: what it says where Pyodide is missing, and how its files are fetched and served."""

import html
import re
import subprocess
import sys
import threading
import urllib.request

import pytest

from workbench.apps.cli import main
from workbench.apps.playground import runtime, server, site


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def pyodide(tmp_path, monkeypatch):
    """A folder with files of the right names, and no node, which could not compile with them."""
    monkeypatch.setattr("workbench.apps.playground.bytecode.shutil.which", lambda name: None)
    folder = tmp_path / "pyodide"
    folder.mkdir()
    for name in (*runtime.FILES, runtime.MSGSPEC_WHEEL):
        (folder / name).write_bytes(name.encode() * 50)
    return folder


def npm_that(script, tmp_path, monkeypatch):
    program = tmp_path / "bin" / "npm"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")


@pytest.mark.parametrize("arguments", [["--fetch"], [], ["--build", "here"]])
def test_without_npm_one_line_says_so(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    assert main(["playground", "--no-browser", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "npm is not installed" in line and not (tmp_path / "here").exists()


def test_the_first_start_fetches_and_says_so(pyodide, tmp_path, monkeypatch, capsys):
    def fetch():
        runtime.runtime_folder().parent.mkdir(parents=True)
        pyodide.rename(runtime.runtime_folder())

    monkeypatch.setattr(runtime, "fetch", fetch)
    for has_fetched in (False, True):
        assert main(["playground", "--build", str(tmp_path / "here")]) == 0
        out = capsys.readouterr().out
        assert ("fetching Pyodide" in out) != has_fetched and (tmp_path / "here" / "index.html").is_file()


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo 'npm error network is unreachable' >&2; exit 1", "network is unreachable"),
        (f"echo other > pyodide-{runtime.PYODIDE.version}.tgz", "it is another file"),
    ],
)
def test_a_failed_download_or_another_file_leaves_nothing(script, words, tmp_path, monkeypatch, capsys):
    npm_that(script, tmp_path, monkeypatch)
    assert main(["playground", "--fetch"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
    assert not runtime.is_fetched() and list((tmp_path / "cache").iterdir()) == []


def test_what_is_fetched_is_not_fetched_again(pyodide, monkeypatch, capsys):
    runtime.runtime_folder().parent.mkdir(parents=True)
    pyodide.rename(runtime.runtime_folder())
    monkeypatch.setenv("PATH", "")
    assert main(["playground", "--fetch"]) == 0
    assert str(runtime.runtime_folder()) in capsys.readouterr().out


def test_the_site_is_served_to_this_machine_with_the_pages_policy(pyodide, tmp_path):
    sizes = site.build(tmp_path / "site", pyodide)
    written = {path.relative_to(tmp_path / "site").as_posix() for path in (tmp_path / "site").rglob("*.*")}
    assert written == set(sizes)
    page = (tmp_path / "site" / "index.html").read_text()
    policy = re.search(r'http-equiv="Content-Security-Policy"\s+content="([^"]*)"', page)
    assert html.unescape(policy[1]) == server.CONTENT_SECURITY_POLICY
    service = server.make_server(tmp_path / "site")
    assert service.server_address[0] == "127.0.0.1"
    threading.Thread(target=service.serve_forever, daemon=True).start()
    try:
        for name, kind in (
            ("", "text/html"),
            ("playground.js", "text/javascript"),
            ("pyodide/pyodide.asm.wasm", "application/wasm"),
        ):
            with urllib.request.urlopen(f"http://127.0.0.1:{service.server_port}/{name}", timeout=30) as answer:
                assert answer.headers["Content-Type"] == kind
                assert answer.headers["Content-Security-Policy"] == server.CONTENT_SECURITY_POLICY
    finally:
        service.shutdown()
        service.server_close()


EVERYTHING = """
import json, sys
sys.path.insert(0, sys.argv[1])
from workbench.apps.playground.presets import PRESETS
from workbench.apps.playground.session import Session
session = Session()
def ask(command, content=None, **values):
    facts = json.loads(session.handle(json.dumps({"command": command, **values}), content).facts)
    assert "error" not in facts, facts
    return facts
workload = json.dumps(PRESETS["chunked"].workload)
requests = ask("run", workload=workload, config={}, policy="")["requests"]
ask("pin")
ask("run", workload=workload, config={"max_num_seqs": 2}, policy="")
ask("numbers")
ask("explain", request=requests[0])
ask("python", workload=workload)
session._newest.traces[0].save(sys.argv[2])
ask("open", open(sys.argv[2], "rb").read(), name="recording")
ask("run", workload="", config={"max_num_seqs": 3})
assert sys.modules["workbench"].__file__.startswith(sys.argv[1])
"""


def test_the_modules_of_the_page_are_all_that_it_needs(tmp_path):
    archive = tmp_path / "package.zip"
    archive.write_bytes(site.package_archive())
    command = [sys.executable, "-I", "-c", EVERYTHING, str(archive), str(tmp_path / "recording.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_the_page_names_no_other_server_and_parses_no_html():
    for path in site.PAGE.iterdir():
        text = path.read_text()
        assert not re.search(r"https?://", text), path.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text), path.name


@pytest.mark.parametrize("port", [-2, 65536, 99999])
def test_a_port_that_cannot_be_is_refused_before_anything_is_fetched(port, monkeypatch, capsys):
    monkeypatch.setattr("workbench.apps.playground.runtime.is_fetched", lambda: pytest.fail("it fetches"))
    assert main(["playground", "--no-browser", "--port", str(port)]) == 2
    assert f"workbench playground: --port must be from 0 to 65535, got {port}" in capsys.readouterr().err
