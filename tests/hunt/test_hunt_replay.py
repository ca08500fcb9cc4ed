"""Findings on other releases: the packages of a folder, and since which release a fault exists."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import workbench
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
        command = ["hunt", "replay", case, case, "--scheduler", "planted:generous"]
        assert main([*command, "--against", str(tmp_path / name)]) == happens
        said = "still happens" if happens else "does not happen"
        assert capfd.readouterr().out.count(f"planted:generous 0.1: limits {said}") == 2


WORKLOAD = {"config": {}, "requests": [{"id": "a", "prompt": {"len": 3}, "max_tokens": 2}]}


def a_finding(folder, facts, workload=WORKLOAD):
    """Write the files of a finding that a replay reads."""
    folder.mkdir(exist_ok=True)
    (folder / "finding.json").write_text(json.dumps({"scheduler": "workbench", "law": "progress"} | facts))
    (folder / "workload.json").write_text(json.dumps(workload))
    return folder


@pytest.mark.parametrize(
    "facts, words",
    [
        ({"scheduler": "subprocess:Popen"}, "add --scheduler subprocess:Popen"),
        ({"scheduler": "vllm:subprocess:Popen"}, "add --scheduler vllm:subprocess:Popen"),
        (
            {"scheduler": "workbench.analysis.hunt.own:OwnScheduler"},
            "add --scheduler workbench.analysis.hunt.own:OwnScheduler",
        ),
        ({"scheduler": "a:b; rm -rf ~"}, "add --scheduler module:name"),
        ({"scheduler": ["workbench"]}, "add --scheduler module:name"),
        ({"scheduler": None}, "add --scheduler module:name"),
        ({"policy": "os:abort"}, "add --policy os:abort"),
        ({"policy": "workbench.scheduler.policies:SchedulingPolicy"}, "add --policy workbench"),
        ({"policy": 5}, "add --policy module:name"),
        ({"scheduler": "engine", "policy": "os:abort"}, "add --policy os:abort"),
        ({"law": "\x1b]0;title\x07"}, "law must be one of"),
        ([], "must be an object"),
    ],
)
@pytest.mark.parametrize("against", [None, "1.0", "1.0..2.0"])
def test_a_file_of_a_finding_never_names_code(facts, words, against, tmp_path, monkeypatch, capsys):
    """Neither what is called, nor the package that is fetched for --against."""

    def never(*given, **more):
        raise AssertionError(f"called with {given}")

    folder = a_finding(tmp_path / "case", facts or {}, {"config": {"touch": 1, "PWNED": 1}, "requests": []})
    if not facts:
        (folder / "finding.json").write_text("[]")
    for name in ("find_target", "released", "unpacked"):
        monkeypatch.setattr(replay, name, never)
    for name in ("run", "Popen"):
        monkeypatch.setattr(subprocess, name, never)
    assert main(["hunt", "replay", str(folder), *(["--against", against] if against else [])]) == 2
    said = capsys.readouterr().err
    assert words in said and "\x1b" not in said


def test_known_words_and_options_are_replayed(tmp_path, capsys):
    for policy in ("", *replay.POLICIES):
        assert main(["hunt", "replay", str(a_finding(tmp_path / "case", {"policy": policy}))]) == 0, policy
    own = "workbench.scheduler.policies:DecodeFirst"
    folder = str(a_finding(tmp_path / "case", {"scheduler": "mine:make", "policy": "mine:Policy"}))
    assert main(["hunt", "replay", folder, "--scheduler", "workbench", "--policy", own]) == 0
    assert capsys.readouterr().out.endswith("progress does not happen\n")


def test_no_code_is_imported_from_a_finding(tmp_path, monkeypatch, capsys):
    """Not if it is the current folder, and not if --against names it."""
    folder = a_finding(tmp_path / "case", {"scheduler": "vllm"})
    for name in ("vllm", "pip", "test_finding"):
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})")
    env = {**os.environ, "PYTHONPATH": str(Path(workbench.__file__).parents[1]), "WORKBENCH_CACHE": str(tmp_path)}
    env |= {"PIP_NO_INDEX": "1"}
    for options in ([], ["--against", "0.0.0"], ["--against", "0.0.0..0.0.1"], ["--against", "."]):
        command = [sys.executable, "-m", "workbench", "hunt", "replay", ".", *options]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
        assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "workload, words",
    [
        ({"requests": [{"num_prompt_tokens": 3}]}, "unknown field 'num_prompt_tokens'"),
        ({"requests": [{"id": "a", "prompt": [1], "remote": 5}]}, "remote must be an object"),
        ({"config": {"max_model_len": "x"}, "requests": []}, "config.max_model_len must be an integer"),
        ({"config": {"kv_cache_groups": 5}, "requests": []}, "kv_cache_groups"),
        ({"requests": [{"id": "a", "prompt": {"len": 10**7}}] * 50}, "tokens, allowed are"),
        ([], "must hold an object"),
    ],
)
def test_a_workload_that_cannot_be_run_is_refused(workload, words, tmp_path, capsys):
    folder = a_finding(tmp_path / "case", {}, workload)
    assert main(["hunt", "replay", str(folder)]) == 2
    assert words in capsys.readouterr().err


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
    (tmp_path / "elsewhere").write_text("kept")
    (tmp_path / "a/report.md").unlink()
    (tmp_path / "a/report.md").symlink_to(tmp_path / "elsewhere")
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
    assert (tmp_path / "elsewhere").read_text() == "kept"
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
