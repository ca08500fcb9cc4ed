"""Trace files: exact round trips, whole or not at all."""

from __future__ import annotations

import gzip
import json
import os
from itertools import pairwise
from operator import is_not

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_checks import assert_same_trace, same_folder
from trace_helpers import one_trace, traces

from workbench import simulate
from workbench.trace import (
    SCHEMA_VERSION,
    Chunk,
    KernelLaunch,
    RequestInfo,
    StepRecord,
    Trace,
    TraceError,
    TraceMeta,
    TraceWriter,
    file,
)
from workbench.trace.reasons import Reason


@settings(same_folder, max_examples=40)
@given(traces(), st.sampled_from([".jsonl", ".jsonl.gz"]))
def test_round_trip(tmp_path, trace, suffix):
    trace.save(tmp_path / f"t{suffix}")
    loaded = Trace.load(tmp_path / f"t{suffix}")
    assert_same_trace(trace, loaded)
    assert loaded.end == trace.end
    assert loaded.problems == []
    loaded.save(tmp_path / f"again{suffix}")
    assert (tmp_path / f"t{suffix}").read_bytes() == (tmp_path / f"again{suffix}").read_bytes()


def test_the_file_of_a_run_is_readable_lines(tmp_path):
    trace = one_trace()
    assert any(record.preempted for record in trace)
    assert any(chunk.num_cached_tokens for record in trace for chunk in record.chunks)
    trace.save(tmp_path / "t.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text(encoding="utf-8").splitlines()]
    assert lines[0]["kind"] == "meta"
    assert lines[0]["schema_version"] == SCHEMA_VERSION
    assert lines[-1] == {"kind": "end", "reason": "done", "num_steps": len(trace)}
    seen = set()
    for line in lines[1:-1]:
        if line["kind"] == "request":
            seen.add(line["request_id"])
        else:
            assert seen.issuperset(line.get("arrived", ()))


def test_save_replaces_only_when_complete(tmp_path, whole, monkeypatch):
    path = tmp_path / "t.jsonl"
    path.write_text("what was there before")
    with monkeypatch.context() as patch:
        patch.setattr(TraceWriter, "close", lambda self, reason="": (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            whole.save(path)
    assert path.read_text() == "what was there before"
    assert os.listdir(tmp_path) == ["t.jsonl"]
    whole.save(path, progress=True)
    assert list(Trace.load(path, progress=True)) == list(whole)
    assert os.listdir(tmp_path) == ["t.jsonl"]


def test_other_endings_are_refused(tmp_path, whole):
    for name in ("t.json", "t.gz", "t", "t.jsonl.zip"):
        with pytest.raises(TraceError, match=rf"saved as \.jsonl or \.jsonl\.gz, not as '{name}'"):
            whole.save(tmp_path / name)
    with pytest.raises(OSError, match="nowhere"):
        whole.save(tmp_path / "nowhere" / "t.jsonl")
    assert os.listdir(tmp_path) == []


def test_values_that_json_has_no_word_for(tmp_path):
    trace = Trace(TraceMeta(config={"block_size": 4, "path": os}))
    trace.add_request(RequestInfo("lone \ud800 surrogate", 1, prompt="\udfff", sampling={"sampler": len}))
    details = {"bytes": np.int64(7), "per_block": np.arange(3)}
    trace.append(StepRecord(0, kernel=KernelLaunch("cpu", details=details)))
    trace.save(tmp_path / "t.jsonl")
    loaded = Trace.load(tmp_path / "t.jsonl")
    assert list(loaded.requests) == ["lone \ufffd surrogate"]
    assert loaded[0].kernel.details == {"bytes": 7, "per_block": [0, 1, 2]}
    assert loaded.requests["lone \ufffd surrogate"].sampling == {"sampler": repr(len)}


def test_several_gzip_streams_in_one_file(tmp_path, whole):
    whole.save(tmp_path / "t.jsonl")
    data = (tmp_path / "t.jsonl").read_bytes()
    (tmp_path / "t.jsonl.gz").write_bytes(b"".join(gzip.compress(data[i : i + 500]) for i in range(0, len(data), 500)))
    assert_same_trace(Trace.load(tmp_path / "t.jsonl.gz"), whole)


def test_lines_are_encoded_as_they_are_decoded():
    chunk = Chunk("a", 0, 1, False, "decode", None, "complete")
    record = StepRecord(3, chunks=(chunk,), timings={"forward": 0.25})
    assert msgspec.json.decode(file.encode_line(record), type=StepRecord) == record


def test_a_line_leaves_out_defaults_at_the_end_of_an_array():
    chunk = Chunk("a", 0, 1, False, "decode", None, "complete")
    record = StepRecord(3, chunks=(chunk,), waiting_reason=Reason("seats", needed=2), passed_over={"b": Reason()})
    line = json.loads(file.encode_line(record))
    assert line["chunks"] == [["a", 0, 1, False, "decode", None, "complete"]]
    assert line["waiting_reason"] == ["seats", "", None, 2] and line["passed_over"] == {"b": []}


def test_a_loaded_trace_keeps_each_id_and_each_table_once(tmp_path):
    requests = [{"id": f"request {i}", "prompt": {"len": 290}, "max_tokens": 40} for i in range(6)]
    simulate({"config": {"max_num_seqs": 4}, "requests": requests}).save(tmp_path / "t.jsonl")
    trace = Trace.load(tmp_path / "t.jsonl")
    named = [[*record.running, *record.waiting, *(chunk.request_id for chunk in record.chunks)] for record in trace]
    assert sum(map(len, named)) > 400
    assert len({id(name) for names in named for name in names}) == len(requests)
    starts = [chunk.start for record in trace for chunk in record.chunks]
    assert len({id(start) for start in starts}) == len(set(starts))
    for field in ("running", "waiting", "_tables", "_table_lengths"):
        kept = [record.__dict__.get(field) or getattr(record, field, ()) for record in trace]
        changes = sum(len(a) != len(b) or any(map(is_not, a, b)) for a, b in pairwise(kept))
        assert len({id(one) for one in kept}) <= changes + 1 < len(trace) / 4, field


def test_a_loaded_trace_keeps_the_id_of_a_block_once(tmp_path):
    requests = [{"id": f"r{i}", "prompt": {"len": 900}, "max_tokens": 200} for i in range(6)]
    config = {"max_num_seqs": 2, "block_size": 2, "num_blocks": 1500, "enable_prefix_caching": True}
    simulate({"config": config, "requests": requests}).save(tmp_path / "t.jsonl")
    trace = Trace.load(tmp_path / "t.jsonl")
    added = [block for record in trace for chunk in record.chunks for block in chunk.new_block_ids]
    blocks = [*added, *(block for record in trace for block in record.cached_block_ids)]
    large = [block for block in blocks if block > 256]  # Python itself keeps smaller numbers once
    assert len(large) > 2 * len(set(large)) > 1000
    assert len({id(block) for block in large}) == len(set(large))
