"""The files of a recording: each can be read alone, and together they are the run."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from vllm_recordings import DATA, LONG

from workbench.simulation.simulate import simulate
from workbench.trace import SCHEMA_VERSION, Trace, TraceMeta
from workbench.trace.recorders.assembler import Assembler
from workbench.trace.recorders.messages import (
    Admission,
    Arrival,
    End,
    Schedule,
    Update,
)
from workbench.trace.recorders.trace_files import TraceFiles


def files_of(workload: Path, folder: Path, max_files: int) -> list[Path]:
    """Write the simulation's records as the writer's process does, in files of 2000 bytes."""
    trace = simulate(workload)
    files = TraceFiles(str(folder), "t", trace.meta, gzip=False, max_file_bytes=2000, max_files=max_files)
    requests = list(trace.requests.values())
    for record in trace:
        while requests and requests[0].request_id in record.arrived:
            files.write(requests.pop(0))
        files.write(record)
    files.close()
    return sorted(folder.iterdir())


def steps_of_gaps(trace: Trace, first: int, last: int) -> Iterator[int]:
    """The steps between two tokens of a request, for each token in some steps."""
    for request_id in trace.requests:
        tokens = [r.step for r in trace for c in r.chunks if c.request_id == request_id for _ in c.accepted]
        yield from (after - before for before, after in pairwise(tokens) if first <= after <= last)


@pytest.mark.parametrize("name", ["d_preempt", "e_shared_prefix", "e2_full_hit_after_finish", "d3_preempt_priority"])
def test_every_file_stands_alone_and_together_they_are_the_run(name, tmp_path):
    workload = DATA / "vllm" / "workloads" / f"{name}.json"
    whole = simulate(workload)
    paths = files_of(workload, tmp_path, max_files=0)
    parts = [Trace.load(path) for path in paths]
    assert len(parts) > 2
    start = f'{{"kind":"meta","schema_version":{SCHEMA_VERSION},'
    assert all(path.read_text().startswith(start) for path in paths)
    steps = [record for part in parts for record in part]
    assert [record.step for record in steps] == [record.step for record in whole]
    for index, part in enumerate(parts):
        assert not part.problems
        assert (part.keyframe is None) == (index == 0)
        assert sum(each.itl_steps.sum() for each in part.metrics().requests.values()) == sum(
            steps_of_gaps(whole, part[0].step, part[-1].step)
        )
        for position, record in enumerate(part):
            expected = whole.pool_state(record.step)
            found = part.pool_state(position)
            assert record.block_tables == whole[record.step].block_tables
            assert found.free_queue.tolist() == expected.free_queue.tolist()
            assert found.block_tables == expected.block_tables
            assert (found.cached == expected.cached).all()


def test_the_oldest_files_are_deleted(tmp_path):
    names = [path.name for path in files_of(LONG, tmp_path / "all", max_files=0)]
    kept = [path.name for path in files_of(LONG, tmp_path / "few", max_files=2)]
    assert len(names) > 2
    assert kept == names[-2:]


def test_a_reused_id_is_written_once_per_file(tmp_path):
    files = TraceFiles(str(tmp_path), "t", TraceMeta(config={"block_size": 4, "num_blocks": 9}), gzip=False)
    assembler = Assembler({"block_size": 4})
    for step in (0, 1):
        for message in (
            Arrival("again", 3, 1, 0, 0.0, 0.0),
            Schedule(step, step, step, 7, ["again"], [], [], [3], [Admission("again", 0, 3, [step + 1])]),
            End("again", "length", True),
            Update(step, step + 0.5, step + 0.5, 8),
        ):
            for line in assembler.take(message):
                files.write(line)
    files.close()
    (path,) = tmp_path.iterdir()
    trace = Trace.load(path)
    assert [record.finished for record in trace] == [("again",), ("again",)]
