"""Findings on other releases: the packages of a folder, and since which release a fault exists."""

import json
from pathlib import Path

import pytest

from workbench.analysis.hunt import hunt, releases, replay
from workbench.apps.cli import main


def test_a_finding_is_replayed_against_a_folder(tmp_path, monkeypatch, capfd):
    """The folder has a scheduler of the same name, without the fault and with it."""
    here = Path(__file__).parent
    monkeypatch.syspath_prepend(here)
    (finding, *_) = hunt("planted:generous", seconds=None, workloads=60, out=tmp_path / "found")
    case = str(tmp_path / "found" / finding.folder)
    text = (here / "planted.py").read_text()
    for name, more, happens in (("mended", "+= 0", 0), ("same", "+= 1", 1)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "planted.py").write_text(text.replace("+= 1", more))
        assert main(["hunt", "replay", case, case, "--against", str(tmp_path / name)]) == happens
        said = "still happens" if happens else "does not happen"
        assert capfd.readouterr().out.count(f"planted:generous 0.1: limits {said}") == 2


@pytest.mark.parametrize("first_bad", range(7))
def test_since_is_found_by_bisection(first_bad):
    versions, tried = [f"1.{number}" for number in range(6)], []

    def happens(version):
        tried.append(version)
        return versions.index(version) >= first_bad

    found = replay.since(versions, happens)
    names = {0: "In 1.0 already, and in 1.5.", 6: "Not in 1.5."}
    assert found == names.get(first_bad, f"Since 1.{first_bad}; not in 1.{first_bad - 1}.")
    assert len(tried) <= 5


def test_since_is_written_into_finding_and_report(tmp_path, monkeypatch, capsys):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "finding.json").write_text(json.dumps({"scheduler": "vllm", "law": "progress"}))
        (tmp_path / name / "report.md").write_text("# A fault\n\n**Version**: vllm 3\n**Place**: here\n")
    happening = {"1": [False, False], "2": [False, True], "3": [True, True]}
    monkeypatch.setattr(replay, "released", lambda package, first, last: ["1", "2", "3"])
    monkeypatch.setattr(replay, "unpacked", lambda package, version: tmp_path / version)
    fakes = {"returncode": 0}

    def run(command, env, **more):
        version = Path(env["PYTHONPATH"].split(":")[0]).name
        return type("Done", (), {**fakes, "stdout": json.dumps(happening[version]) + "\n"})()

    monkeypatch.setattr(replay.subprocess, "run", run)
    for _ in range(2):
        assert replay.replay_against([tmp_path / "a", tmp_path / "b"], "1..3") == 1
        assert capsys.readouterr().out == "a: Since 3; not in 2.\nb: Since 2; not in 1.\n"
    assert json.loads((tmp_path / "b/finding.json").read_text())["since"] == "Since 2; not in 1."
    report = (tmp_path / "b/report.md").read_text()
    assert report == "# A fault\n\n**Version**: vllm 3\n**Since**: Since 2; not in 1.\n**Place**: here\n"


def test_what_packages_require(tmp_path):
    for name, lines in {
        "a-1": 'Requires-Dist: Py-Thing>=2 ; extra == "x"\nRequires-Dist: other[y]==3\n',
        "b-2": "",
    }.items():
        (tmp_path / f"{name}.dist-info").mkdir()
        (tmp_path / f"{name}.dist-info/METADATA").write_text(lines)
    assert releases._requirements(tmp_path) == {"py_thing": "Py-Thing>=2", "other": "other[y]==3"}


def test_a_release_that_does_not_exist_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))
    monkeypatch.setattr(releases.sys, "executable", str(tmp_path / "pip"))
    (tmp_path / "pip").write_text("#!/bin/sh\necho 'ERROR: no such version' >&2\nexit 1\n")
    (tmp_path / "pip").chmod(0o755)
    with pytest.raises(ValueError, match=r"vllm==9\.9 cannot be fetched: ERROR: no such version"):
        releases.unpacked("vllm", "9.9")
    with pytest.raises(ValueError, match="vllm has no releases from 1 to 2"):
        releases.released("vllm", "1", "2")
