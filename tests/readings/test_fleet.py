"""Recordings of several ranks: all are found, those of earlier runs are not, and their metrics are merged."""

import html
import os
import random
import re
import time

import msgspec
import numpy as np
import pytest

from workbench import Trace, simulate
from workbench.apps.cli import main
from workbench.simulation.costs.cost_model import CostModel
from workbench.trace import TraceError, TraceWriter
from workbench.trace.readings.fleet import Fleet, find_recordings
from workbench.trace.recorders.trace_files import TraceFiles
from workbench.trace.run_zero import clock_starts
from workbench.trace.storage import lines_of
from workbench.viz.fleet_page import fleet_html

NOW = 1_700_000_000.0


def run_of(rank, num_requests=12, **others):
    rng = random.Random(rank)
    requests = [
        {
            "id": f"{rank}-{i}",
            "prompt": {"len": rng.randint(5, 200)},
            "max_tokens": rng.randint(1, 12),
            "arrival_time": rng.uniform(0, 0.5),
        }
        for i in range(num_requests)
    ]
    config = {"max_num_batched_tokens": 128, "max_num_seqs": 3, "num_blocks": 300, "enable_prefix_caching": False}
    cost = CostModel(fixed=0.01, per_prefill_token=1e-4, per_sequence=1e-3)
    return simulate({"config": config | others, "requests": requests}, cost_model=cost)


def save(folder, trace, rank, *, created=NOW, host="node1", pid=7, written=None, stop_after=None, engine="vllm"):
    folder.mkdir(exist_ok=True)
    path = folder / f"{engine}-20260101-120000-{host}-rank{rank}-{pid}-0-00000.jsonl.gz"
    writer = TraceWriter(path, msgspec.structs.replace(trace.meta, created=created))
    for number, line in enumerate(lines_of(trace)):
        if number == stop_after:
            return writer, list(lines_of(trace))[number:]
        writer.write(line)
    writer.close("done")
    os.utime(path, (written or created + 30,) * 2)
    return path


def test_all_ranks_and_their_metrics_together(tmp_path, capsys):
    runs = [run_of(rank, num_requests=12 + rank) for rank in range(3)]
    for rank, run in enumerate(runs):
        save(tmp_path / "run", run, rank, created=NOW + 2 * rank, pid=100 + rank)
    with Fleet(tmp_path / "run") as fleet:
        assert list(fleet.traces) == ["rank 0", "rank 1", "rank 2"]
        assert [list(trace) for trace in fleet.traces.values()] == [list(run) for run in runs]
        merged = fleet.metrics()
    metrics = [run.metrics() for run in runs]
    for name in ("num_steps", "num_requests", "num_finished", "num_output_tokens", "num_scheduled_tokens"):
        assert getattr(merged.summary, name) == sum(getattr(each.summary, name) for each in metrics) > 0
    waits = [request.ttft.seconds for each in metrics for request in each.requests.values()]
    assert merged.summary.ttft.p99 == pytest.approx(np.percentile(waits, 99))
    ends = [2 * rank + run[-1].end for rank, run in enumerate(runs)]
    assert merged.summary.duration == pytest.approx(max(ends) - runs[0][0].time)
    assert merged.summary.output_throughput == pytest.approx(merged.summary.num_output_tokens / merged.summary.duration)
    assert merged.requests["rank 2/2-3"].ttft == metrics[2].requests["2-3"].ttft
    assert (np.diff(merged.steps.time) >= 0).all()
    assert main(["trace", "info", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert "3 recordings in" in said and "rank 2" in said and "together" in said
    assert f"{merged.summary.num_finished} of {merged.summary.num_requests} requests ended" in said


def test_a_simulation_beside_recordings_counts_from_its_own_zero(tmp_path):
    """It has no wall clock: that of 1970 would make the run of the folder last for decades."""
    runs = [run_of(rank) for rank in range(3)]
    for rank, (run, created) in enumerate(zip(runs, (NOW, NOW + 2, 0.0))):
        save(tmp_path, run, rank, created=created, written=NOW)
    fleet, late = Fleet(tmp_path), (0, 2, 0)
    assert list(fleet.traces) == ["rank 0", "rank 1", "rank 2"]
    ends = [seconds + run[-1].end for seconds, run in zip(late, runs)]
    begins = [seconds + run[0].time for seconds, run in zip(late, runs)]
    assert fleet.metrics().summary.duration == pytest.approx(max(ends) - min(begins))
    assert clock_starts(fleet.traces) == {
        f"rank {rank}": pytest.approx(at - min(begins)) for rank, at in enumerate(late)
    }
    changes = [(seconds + r.time, 1, rank, len(r.running)) for rank, seconds in enumerate(late) for r in runs[rank]]
    changes += [(end, 0, rank, 0) for rank, end in enumerate(ends)]
    now, most = [0] * 3, 0
    for _, _, rank, running in sorted(changes):
        now[rank] = running
        most = max(most, sum(now))
    assert f"0 ({most})" in fleet_html(fleet)


def test_drafts_are_added_up(tmp_path):
    runs = []
    for rank in (0, 1):
        requests = [{"id": "a", "prompt": {"len": 30}, "max_tokens": 20 + rank, "accepts": [2, 0, 1 + rank]}]
        runs.append(simulate({"config": {"num_speculative_tokens": 2 + rank}, "requests": requests}))
        save(tmp_path, runs[-1], rank)
    merged = Fleet(tmp_path).metrics().speculation
    parts = [run.metrics().speculation for run in runs]
    assert merged.num_accepted == sum(part.num_accepted for part in parts) > 0
    assert merged.drafts_per_position[0] == sum(part.drafts_per_position[0] for part in parts)
    assert len(merged.drafts_per_position) == 3 and merged.drafts_per_position[2] == parts[1].drafts_per_position[2]


def test_a_recording_in_several_files_is_read_from_its_oldest(tmp_path):
    run = run_of(0, num_requests=40)
    folder, prefix = tmp_path / "run", "vllm-20260101-120000-node1-rank0-7-0"
    files = TraceFiles(str(folder), prefix, run.meta, max_file_bytes=3000, max_files=0)
    requests = list(run.requests.values())
    for record in run:
        while requests and requests[0].request_id in record.arrived:
            files.write(requests.pop(0))
        files.write(record)
    files.close()
    (recording,) = find_recordings(folder)
    assert len(recording.paths) > 2 and (recording.host, recording.rank) == ("node1", 0)
    assert list(Fleet(folder).traces["rank 0"]) == list(run)
    newest = Fleet(folder, whole=False).traces["rank 0"]
    assert 0 < len(newest) < len(run) and list(newest) == list(run)[-len(newest) :]


@pytest.mark.parametrize(
    ("others", "names"),
    [
        ([dict(rank=0, pid=1, created=NOW - 300, written=NOW - 20)], ["rank 0", "rank 1"]),  # restarted
        ([dict(rank=5, pid=1, created=NOW - 900, written=NOW - 400)], ["rank 0", "rank 1"]),  # another server, over
        ([dict(rank=0, pid=1, created=NOW - 300, written=NOW + 500)], ["rank 0", "rank 1"]),  # restarted, and copied
        ([dict(rank=0, pid=1, created=NOW - 300, engine="sglang")], ["rank 0", "rank 1"]),
        (
            [dict(rank=1, pid=1, host="node2")],
            ["rank 0", "rank 1 on node1", "rank 1 on node2"],
        ),
        (
            [dict(rank=1, pid=1, created=NOW + 20)],
            [
                "rank 0",
                "vllm-20260101-120000-node1-rank1-1-0",
                "vllm-20260101-120000-node1-rank1-7-0",
            ],
        ),
    ],
)
def test_only_the_newest_run_counts(tmp_path, others, names):
    run = run_of(0, 2)
    save(tmp_path, run, 0)
    save(tmp_path, run, 1, created=NOW + 20)
    paths = [save(tmp_path, run, **other) for other in others]
    fleet = Fleet(tmp_path)
    assert list(fleet.traces) == names
    left_out = [path.name.removesuffix("-00000.jsonl.gz") for path in paths if len(names) == 2]
    assert fleet.left_out == left_out and all(name in fleet.note for name in left_out)


def test_what_is_left_out_is_said_and_does_not_depend_on_the_times_of_files(tmp_path, capsys):
    """Files that a person named are all there; of a server's, every answer names those of earlier runs."""
    for n in range(4):
        trace = run_of(n)
        named = msgspec.structs.replace(trace.meta, created=NOW + 1000 * n)
        for folder, name in (("own", f"run{n}.jsonl"), ("server", f"vllm-20260101-120000-a-rank0-{n}-0-00000.jsonl")):
            (tmp_path / folder).mkdir(exist_ok=True)
            with TraceWriter(tmp_path / folder / name, named) as writer:
                for line in lines_of(trace):
                    writer.write(line)
            os.utime(tmp_path / folder / name, (NOW + 1000 * n + 5,) * 2)
    for is_copy in (False, True):
        if is_copy:
            for path in tmp_path.glob("*/*"):
                os.utime(path, (NOW + 9000,) * 2)
        assert main(["trace", "info", str(tmp_path / "own")]) == 0
        said = capsys.readouterr().out
        assert "4 recordings in" in said and "left out" not in said
        folder = str(tmp_path / "server")
        for command in (["trace", "info"], ["trace", "explain"], ["trace", "whatif"], ["trace", "misses"], ["why"]):
            main([*command, folder])
            said = "".join(capsys.readouterr())
            assert said.count("left out") == 1, command
            unbroken = "".join(said.split())
            assert ("3recordingsleftout" in unbroken and "1recordingin" in unbroken) or command != ["trace", "info"]
            assert all(f"a-rank0-{n}-0" in unbroken for n in range(3))
    with Fleet(folder) as fleet:
        assert fleet.note in html.unescape(fleet_html(fleet))


def test_one_throughput_of_a_folder(tmp_path, capsys):
    """The last row of the table is the throughput of the sentence below, also if only the folder as a whole idles."""
    for n in range(2):
        run = run_of(n)
        save(tmp_path, run, n, created=NOW + 20 * n)
    with Fleet(tmp_path) as fleet:
        together = fleet.metrics().summary
    assert together.clock.idle > 0 and not any(run_of(n).metrics().summary.clock.idle for n in range(2))
    assert main(["trace", "info", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    (row,) = re.findall(r"^together .*$", said, re.MULTILINE)
    (rate,) = re.findall(r"^throughput: ([\d.,]+) output .* without idle time$", said, re.MULTILINE)
    assert row.split()[4] == rate == f"{together.num_output_tokens / together.clock.at_work:.4g}"
    assert "output tokens/s are without idle time" in said


def test_ranks_grow_and_later_ones_are_added(tmp_path):
    run = run_of(3)
    created = time.time()
    writer, rest = save(tmp_path, run, 0, created=created, stop_after=15)
    with Fleet(tmp_path, whole=False) as fleet:
        before = len(fleet.traces["rank 0"])
        for line in rest:
            writer.write(line)
        writer.close("done")
        save(tmp_path, run, 1, created=created + 1, written=created + 2)
        (tmp_path / "vllm-20260101-120000-node1-rank2-7-0-00000.jsonl.gz").write_bytes(b"")  # made, not written to
        fleet.poll()
        assert before < len(fleet.traces["rank 0"]) == len(run)
        assert list(fleet.traces) == ["rank 0", "rank 1"] and len(fleet.traces["rank 1"]) == len(run)


def test_a_file_system_whose_clock_is_a_little_behind(tmp_path):
    save(tmp_path, run_of(1), 0, created=NOW, written=NOW - 0.004)
    with Fleet(tmp_path) as fleet:
        assert list(fleet.traces) == ["rank 0"]


def test_a_rank_without_a_step_and_a_damaged_one(tmp_path, caplog):
    run = run_of(1)
    save(tmp_path, run, 0)
    save(tmp_path, Trace(run.meta), 1)
    (tmp_path / "vllm-20260101-120000-node1-rank2-7-0-00000.jsonl").write_text("damaged\n")
    with Fleet(tmp_path) as fleet:
        assert list(fleet.traces) == ["rank 0", "rank 1"]
        assert fleet.metrics().summary.num_steps == len(run)
        assert fleet.metrics().summary.unit == "s"


def test_a_folder_without_a_trace(tmp_path, capsys):
    with pytest.raises(TraceError, match="holds no trace file"):
        Fleet(tmp_path)
    (tmp_path / "a.jsonl").write_text("damaged\n")
    with pytest.raises(TraceError, match=r"a\.jsonl"):
        Fleet(tmp_path)
    assert main(["trace", "info", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
