"""Pickles and copies of a trace: the contents of a saved file, as a separate trace."""

import copy
import pickle

import pytest

from workbench import Engine, SamplingParams
from workbench.trace import Trace, TraceError

WAYS = {
    "pickle": lambda trace: pickle.loads(pickle.dumps(trace)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


@pytest.fixture(scope="module")
def trace(tiny_llama):
    with Engine(tiny_llama, num_blocks=24, max_num_batched_tokens=16, record_top_tokens=2) as engine:
        for length in (30, 5, 12, 20):
            engine.add_request(list(range(3, 3 + length)), SamplingParams(max_tokens=9))
        engine.run(progress=False)
    return engine.trace


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("part", [slice(None), slice(3, 7), slice(4, None), slice(2, 2)], ids=str)
def test_a_copy_is_what_a_file_holds(trace, tmp_path, way, part):
    given = trace if part == slice(None) else trace[part]
    given.save(tmp_path / "t.jsonl")
    expected, made = Trace.load(tmp_path / "t.jsonl"), WAYS[way](given)
    assert made.to_dict() == expected.to_dict()
    assert list(made) == list(given)
    assert made.keyframe == expected.keyframe
    assert [record.block_tables for record in made] == [record.block_tables for record in given]


def test_a_copy_of_a_growing_trace_grows_by_itself(trace):
    growing = pickle.loads(pickle.dumps(trace[:4]))
    for copied in (copy.copy(growing), copy.deepcopy(growing), pickle.loads(pickle.dumps(growing))):
        copied.append(trace[4])
        assert (len(copied), len(growing)) == (5, 4)


def test_problems_are_kept_and_a_damaged_pickle_is_refused(trace, tmp_path):
    trace.save(tmp_path / "t.jsonl")
    (tmp_path / "t.jsonl").write_bytes(b"\n".join((tmp_path / "t.jsonl").read_bytes().split(b"\n")[:8]))
    cut = Trace.load(tmp_path / "t.jsonl")
    assert cut.problems
    assert pickle.loads(pickle.dumps(cut)).problems == cut.problems
    assert pickle.loads(pickle.dumps(cut)).end == "cut"
    with pytest.raises(TraceError, match="a pickled trace, line 3"):
        make, (kind, content, problems) = trace.__reduce__()
        first, second, third = content.split(b"\n", 2)
        make(kind, b"\n".join([first, second, second, third]), problems)
