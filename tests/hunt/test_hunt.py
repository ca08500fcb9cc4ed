"""A short hunt: nothing in our scheduler, and planted faults are found and shrunk."""

import json
import random
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiers import examples

from workbench.analysis.hunt import hunt, target
from workbench.analysis.hunt.drive import Plan, PlannedChunk, live_request
from workbench.analysis.hunt.plain_laws import CheckOrder
from workbench.analysis.hunt.progress import UNSERVABLE, obstacle
from workbench.analysis.hunt.search import shape
from workbench.analysis.hunt.workloads import FEATURES, PAGES, SPARE_TOKENS, WORKLOAD_BYTES, length_of, make_workload
from workbench.apps.cli import main
from workbench.trace import Trace

sys.path.insert(0, str(Path(__file__).parent))


def test_nothing_in_our_scheduler():
    assert hunt(seconds=None, workloads=examples(300), seed=1) == []


@pytest.mark.repeats(step=2)
@pytest.mark.parametrize("name, law", [("generous", "limits"), ("forgetful", "exactly_once")])
def test_a_planted_fault_is_found_and_shrunk(name, law):
    (finding, *_) = hunt(f"planted:{name}", seconds=None, workloads=400)
    assert finding.law == law and finding.num_requests <= 3
    assert f"<b>{law}</b>: " in finding._repr_html_() and finding.protects in finding._repr_html_()


@pytest.mark.repeats(of="test_a_planted_fault_is_found_and_shrunk")
def test_a_recipe_finds_the_hashes_of_a_chunk_that_is_taken_back():
    (finding, *_) = hunt("planted:hoarding", seconds=None, workloads=600, laws=["content"], seed=3)
    assert finding.law == "content" and finding.num_requests <= 3


def test_the_next_hunt_tries_what_it_remembers_first(tmp_path):
    for seed in (3, 4):
        (finding, *_) = hunt("planted:generous", seconds=None, workloads=60, seed=seed, out=tmp_path)
    assert finding.num_workloads == 1
    hunt("workbench", seconds=None, workloads=1, out=tmp_path)  # without the fault
    (finding, *_) = hunt("planted:forgetful", seconds=None, workloads=400, out=tmp_path)
    assert finding.num_workloads > 1


def test_a_step_that_does_not_end_is_found(monkeypatch):
    monkeypatch.setattr(target, "MAX_SECONDS", 0.1)
    (finding, *_) = hunt("planted:endless", seconds=None, workloads=60)
    assert finding.law == "crash" and finding.place == "a step does not end"


def test_workloads_have_adapters_for_schedulers_that_have_them():
    rng = random.Random(0)
    drawn = [rng.randbytes(WORKLOAD_BYTES) for _ in range(300)]
    has = [workload for each in drawn if "adapters" in shape(workload := make_workload(each, FEATURES))]
    assert len(has) > 10
    assert {workload["config"]["max_loras"] for workload in has} == {1, 2}
    without = [name for name in FEATURES if name != "adapters"]
    assert not any("max_loras" in make_workload(each, without)["config"] for each in drawn)


def test_a_scheduler_of_pages_gets_limits_that_it_takes():
    """Whole pages in a budget, and a little room beside each request; some replies outgrow the pool together."""
    rng, outgrown = random.Random(4), 0
    for _ in range(300):
        made = make_workload(rng.randbytes(WORKLOAD_BYTES), ("caching", PAGES))
        config, block = made["config"], made["config"]["block_size"]
        sizes = [length_of(request["prompt"]) + request["max_tokens"] for request in made["requests"]]
        assert config["max_num_batched_tokens"] % block == 0
        assert config["max_model_len"] >= max(sizes) + SPARE_TOKENS
        room = (config["num_blocks"] - 1) * block
        assert room >= max(sizes) + SPARE_TOKENS + block
        outgrown += sum(sorted(sizes)[-config["max_num_seqs"] :]) > room and block < 8
    assert outgrown > 30


def test_the_folder_of_a_finding(tmp_path, capsys):
    command = ["hunt", "--scheduler", "planted:generous", "--workloads", "60", "--out", str(tmp_path)]
    assert main(command) == 1
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    folder = tmp_path / summary["findings"][0]
    finding = json.loads((folder / "finding.json").read_text())
    assert finding["law"] == "limits" and finding["scheduler"] == "planted:generous"
    assert len(json.loads((folder / "workload.json").read_text())["requests"]) == finding["num_requests"]
    trace = Trace.load(folder / "trace.jsonl.gz")
    assert len(trace) >= finding["step"] and trace.end == "cut", "the law was broken; the run itself is not stuck"
    assert "breaks the law of limits" in (folder / "page.html").read_text()


def test_a_run_that_cannot_be_drawn_loses_nothing_else(tmp_path, monkeypatch):
    def fails(*_):
        raise RuntimeError("a < b")

    monkeypatch.setattr("workbench.viz.finding_page.page", fails)
    findings = hunt("planted:generous", seconds=None, workloads=60, out=tmp_path)
    folder = tmp_path / findings[0].folder
    assert "RuntimeError(&#x27;a &lt; b&#x27;)" in (folder / "page.html").read_text()
    assert Trace.load(folder / "trace.jsonl.gz") and (folder / "report.md").exists()
    assert (folder / "test_finding.py").exists()


def test_the_command_names_the_folder_if_its_name_is_taken(tmp_path, capsys):
    (finding, *_) = hunt("planted:generous", seconds=None, workloads=60, out=tmp_path)
    taken = tmp_path / finding.folder / "workload.json"
    taken.write_text(taken.read_text().replace('"max_tokens": ', '"max_tokens": 1'))
    for _ in range(2):
        assert main(["hunt", "--scheduler", "planted:generous", "--workloads", "60", "--out", str(tmp_path)]) == 1
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["findings"] == [f"{finding.name}-2"]
    assert json.loads((tmp_path / f"{finding.name}-2/finding.json").read_text())["folder"] == f"{finding.name}-2"


@pytest.mark.parametrize("all_free, field", [(False, "num_blocks"), (True, "max_num_batched_tokens")])
def test_a_pool_that_nobody_holds_is_not_the_first_obstacle(all_free, field):
    workload = {"config": {"num_blocks": 8, "max_num_batched_tokens": 5}, "requests": []}
    words = obstacle(workload, lambda other: other["config"] != workload["config"], all_free=all_free)
    assert words == f"requests wait forever, {field} is too small"
    workload["config"]["num_speculative_tokens"] = 5
    words = obstacle(workload, lambda other: other["config"] != workload["config"], all_free=all_free)
    assert words.endswith("max_num_batched_tokens is below 1 + drafts") is all_free


def test_the_slot_of_a_draft_model_is_part_of_its_budget():
    config = {"max_num_batched_tokens": 2, "num_speculative_tokens": 1, "spec_method": "draft_model"}
    for budget, words in ((2, "below 1 + drafts"), (3, "too small")):
        workload = {"config": config | {"max_num_batched_tokens": budget}, "requests": []}
        told = obstacle(workload, lambda other: other["config"]["max_num_batched_tokens"] > 3)
        assert told == f"requests wait forever, max_num_batched_tokens is {words}"


@pytest.mark.parametrize("others_end", [True, False])
def test_an_unservable_request_is_the_obstacle_until_it_is_aborted(others_end):
    requests = [{"prompt": {"len": 9}, "max_tokens": 1, "abort_step": 4}, {"prompt": {"len": 1}, "max_tokens": 1}]
    workload = {"config": {"num_blocks": 3, "block_size": 2}, "requests": requests}
    words = obstacle(workload, lambda other: others_end and other["requests"] == requests[1:])
    assert words == (UNSERVABLE if others_end else "requests wait forever")
    assert obstacle({**workload, "requests": requests[:1]}, lambda other: False) == UNSERVABLE


@pytest.mark.parametrize(
    "got, preempted, on_their_way, allows, skipped",
    [
        ("ac", "", 0, (), "b runs"),  # one behind it has a token
        ("a", "", 0, (), "b runs"),  # budget is left
        ("a", "c", 0, (), ""),  # c found no block, which ends the step
        ("ac", "", 1, (), "b runs"),  # asynchronous, one token of two is to come
        ("ac", "", 2, (), ""),
        ("ac", "", 0, ("a running request is skipped",), ""),
        ("abc", "", 0, (), ""),
    ],
)
def test_the_generated_check_of_the_order_sees_a_request_that_is_skipped(got, preempted, on_their_way, allows, skipped):
    requests = {name: live_request(0, {"id": name, "prompt": {"len": 3}, "max_tokens": 2}) for name in ("a", "b", "c")}
    requests["b"].num_expected = on_their_way
    scheduler = SimpleNamespace(allows=allows)
    run = SimpleNamespace(config={"max_num_batched_tokens": 8}, requests=requests, scheduler=scheduler)
    check = CheckOrder()
    check.before = tuple("abc")
    running = tuple(name for name in "abc" if name not in preempted)
    plan = Plan([PlannedChunk(name, 0, 1) for name in got], list(preempted), running=running)
    with pytest.raises(AssertionError, match=skipped) if skipped else nullcontext():
        check.scheduled(run, plan)


def test_the_example_of_the_page(tmp_path, monkeypatch):
    text = (Path(__file__).parents[2] / "docs/hunt.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.S)
    (tmp_path / "page_example.py").write_text(example)
    monkeypatch.syspath_prepend(tmp_path)
    for limit in ("shrink.SECONDS", "search.SHRINK_SECONDS"):  # a busy machine would shrink less
        monkeypatch.setattr(f"workbench.analysis.hunt.{limit}", 60.0)
    (finding, *_) = hunt("page_example:make_scheduler", seconds=None, workloads=250, laws=["progress", "blocks"])
    assert finding.law == "progress" and finding.num_requests <= 2
    assert "num_blocks" in finding.smallest_change


def test_several_processes_agree_on_a_fault(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    findings = hunt("planted:generous", seconds=None, workloads=120, jobs=2)
    assert [finding.law for finding in findings].count("limits") == len(findings) > 0


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_what_the_scheduler_lacks_and_what_was_seen_is_told(jobs, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    command = ["hunt", "--scheduler", "planted:older", "--workloads", "20", "-j", jobs, "--out", str(tmp_path)]
    assert main(command) == 0
    told = capsys.readouterr().err
    assert "not in planted:older 0.1: watermark" in told
    assert re.search(r"\d+ workloads, \d+/s, [1-9]\d* pairs of features, 0 findings", told)
    shares = [int(share) for share in re.search(r"generation (\d+)%, scheduler (\d+)%, laws (\d+)%", told).groups()]
    assert abs(sum(shares) - 100) <= 1 and min(shares) > 0


def test_a_finding_is_replayed(tmp_path, capsys):
    (finding, *_) = hunt("planted:generous", seconds=None, workloads=60, out=tmp_path)
    folder = tmp_path / finding.name
    assert main(["hunt", "replay", str(folder), "--scheduler", "planted:generous"]) == 1
    assert main(["hunt", "--scheduler", "planted:generous", "replay", str(folder)]) == 1
    assert "still happens" in capsys.readouterr().out
    facts = json.loads((folder / "finding.json").read_text())
    (folder / "finding.json").write_text(json.dumps(facts | {"scheduler": "workbench"}))
    assert main(["hunt", "replay", str(folder)]) == 0


@pytest.mark.parametrize(
    "options, words",
    [
        (["--for", "never"], "--for"),
        (["--scheduler", "nonsense"], "module:factory"),
        (["--only", "nonsense"], "the laws are"),
        (["--workloads", "0"], "--workloads"),
    ],
)
def test_bad_options_are_named(options, words, tmp_path, capsys):
    assert main(["hunt", *options, "--out", str(tmp_path)]) == 2
    assert words in capsys.readouterr().err


def test_an_exception_has_a_name_and_is_switched():
    options = {"seconds": None, "workloads": 60, "laws": ["order"]}
    (finding, *_) = hunt("workbench", **options, allow=[])
    assert finding.place == "priority_waits_at_full_seats"
    assert hunt("workbench", **options, allow=["priority_waits_at_full_seats", "preempted_behind_newcomers"]) == []
    with pytest.raises(ValueError, match="--allow names 'speed'; the exceptions are finished_rows_keep_seats"):
        hunt("workbench", allow=["speed"])


def test_each_help_has_the_options_of_its_command(capsys):
    found = {}
    for command in (["hunt"], ["hunt", "replay"]):
        with pytest.raises(SystemExit):
            main([*command, "--help"])
        found[len(command)] = set(re.findall(r"--\w+", capsys.readouterr().out)) - {"--help"}
    assert found[1] >= {"--for", "--workloads", "--out", "--jobs"} and "--against" not in found[1]
    assert found[2] == {"--against", "--scheduler", "--policy"}
    for command in (["hunt", "replay"], ["hunt", "found/a"], ["hunt", "replay", "found/a", "--for", "3s"]):
        with pytest.raises(SystemExit, match="2"):
            main(command)
