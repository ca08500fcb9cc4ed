"""Small files that become large ones: refused before they use up the memory."""

import gzip
import subprocess
import sys

import pytest

from workbench import simulate
from workbench.trace import Trace, TraceError
from workbench.trace.follower import TraceFollower

META = b'{"kind":"meta","schema_version":4,"source":"simulation"}\n'
STEP = b'{"kind":"step","step":0,"arrived":["r0"],"waiting":["r0"]}\n'
BOMBS = (
    META + bytes(40 << 20),
    META + b'{"kind":"request","request_id":"a","prompt_token_ids":[' + b"1," * (20 << 20),
)
READ = """
import resource, sys
from workbench.trace import Trace
from workbench.trace.follower import TraceFollower
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sys.argv[1:]:
    for read in (Trace.load, TraceFollower):
        try:
            read(path)
        except ValueError as problem:
            print(problem)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // (1024 if sys.platform == "darwin" else 1))
"""


def test_a_small_file_that_becomes_large_is_refused(tmp_path):
    paths = [tmp_path / f"{number}.jsonl.gz" for number in range(len(BOMBS))]
    for path, content in zip(paths, BOMBS):
        with gzip.open(path, "wb", compresslevel=6) as file:
            file.write(content)
        assert path.stat().st_size < 600_000
    run = subprocess.run([sys.executable, "-c", READ, *paths], capture_output=True, text=True, timeout=120)
    *messages, growth = run.stdout.splitlines()
    assert len(messages) == 4 and all("times as large" in message for message in messages), run
    assert int(growth) < 200_000, "KiB"


def test_several_streams_in_a_row_and_files_that_grow_are_read(tmp_path):
    trace = simulate({"requests": [{"id": f"r{i}", "prompt": {"len": 40}, "max_tokens": 5} for i in range(30)]})
    plain, path = tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"
    trace.save(plain)
    data = plain.read_bytes()
    half = len(data) * 4 // 5
    with path.open("wb") as file:
        file.write(gzip.compress(data[:half]))
        file.flush()
        follower = TraceFollower(path)
        seen = len(follower.trace)
        assert 0 < seen < len(trace)
        file.write(gzip.compress(data[half:]))
        file.flush()
        assert follower.poll() == len(trace) - seen
    assert list(follower.trace) == list(Trace.load(path)) == list(trace)
    follower.stop()


def test_damaged_streams_are_refused(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(META)[:-4] + b"1234" + gzip.compress(STEP))
    with pytest.raises(TraceError, match="damaged"):
        Trace.load(path)
