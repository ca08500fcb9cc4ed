"""Faults at every stage of a step: they hit the requests they belong to, are named, and leave no trace behind.

After each fault the same is checked: who was not hit gets the tokens of an engine without faults, all KV blocks are
free, the books agree, and the prompts that were hit are answered right when they are asked again.
"""

import contextlib
import gc
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from law_runs import assert_laws

from workbench import Engine, EngineConfig, SamplingParams, Trace
from workbench.engine.sampler import Logits

CONFIG = EngineConfig(max_num_batched_tokens=24, max_num_seqs=4, block_size=4, num_blocks=24, max_model_len=64)
GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)


def prompt(seed, length=10):
    return np.random.default_rng(seed).integers(3, 120, size=length).tolist()


PROMPTS = [prompt(seed, length) for seed, length in enumerate((13, 9, 10, 14, 8, 12))]
"""Two more prompts than seats: the last ones wait while the first run."""


@pytest.fixture
def engine(tiny_llama, caplog):
    caplog.set_level(logging.CRITICAL, "workbench")
    with Engine(tiny_llama, CONFIG) as made:
        yield made


@pytest.fixture(scope="module")
def right(tiny_llama):
    """Tokens of each prompt from an engine without faults."""
    with Engine(tiny_llama, CONFIG) as engine:
        for each in PROMPTS:
            engine.add_request(each, GREEDY)
        return [output.token_ids for output in engine.run(progress=False)]


def check_afterwards(engine, right, hit):
    """Run to the end; ``hit`` are the indices of the prompts whose requests the fault ended."""
    engine.run(progress=False)
    outputs = list(engine.outputs.values())[: len(PROMPTS)]
    assert [index for index, output in enumerate(outputs) if output.finish_reason == "error"] == hit
    for index, output in enumerate(outputs):
        if index not in hit:
            assert output.token_ids == right[index], f"request {index} was not hit and got other tokens"
    ended = [request_id for record in engine.trace for request_id in (*record.finished, *record.aborted)]
    assert sorted(ended) == sorted(engine.outputs), "a request ended twice, or never"
    assert engine.scheduler.num_free_blocks == CONFIG.num_usable_blocks
    assert_laws(engine.scheduler)
    for index in hit:
        again = engine.add_request(PROMPTS[index], GREEDY)
        engine.run(progress=False)
        assert engine.output(again).token_ids == right[index], f"prompt {index} is answered wrong after the fault"
    return outputs


# -- a stage of the step fails: the requests of its batch end, those that wait do not -------------------------------


def raise_error(*_, **__):
    raise RuntimeError("planted")


def run_out_of_memory(*_, **__):
    np.empty(2**61, np.uint8)  # numpy's own MemoryError


@pytest.mark.repeats(every="pair")
@pytest.mark.parametrize("fault", [raise_error, run_out_of_memory])
@pytest.mark.parametrize(
    "stage",
    ["step.prepare_unified", "runner.forward", "runner.layer", "path.run", "sampler.sample"],
)
@pytest.mark.parametrize("at_step", [0, 2, 4], ids=lambda step: f"step{step}")
def test_a_stage_fails(engine, right, monkeypatch, stage, at_step, fault):
    for each in PROMPTS:
        engine.add_request(each, GREEDY)
    for _ in range(at_step):
        engine.step()
    owner, name = stage.split(".")
    with monkeypatch.context() as patch:
        if owner == "step":
            patch.setattr(f"workbench.engine.{stage}", fault)
        elif name == "layer":  # inside of the forward pass, with keys and values half written
            patch.setattr(type(engine.model.model.model.layers[1].mlp), "__call__", fault)
        else:
            patch.setattr(engine.runner.path if owner == "path" else getattr(engine, owner), name, fault)
        record = engine.step()
    assert set(record.finish_reasons.values()) == {"error"} and record.free_blocks_end == CONFIG.num_usable_blocks
    hit = sorted(int(request_id[1:]) for request_id in record.finished)
    outputs = check_afterwards(engine, right, hit)
    words = "RuntimeError: planted" if fault is raise_error else "MemoryError: Unable to allocate 2.00 EiB"
    assert all(words in outputs[index].error for index in hit)


# -- one request fails: those in its batch do not -------------------------------------------------------------------


def fails(history, logits):
    raise ZeroDivisionError("planted")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"logits_processors": [fails]}, "ZeroDivisionError: planted"),
        ({"logits_processors": [lambda history, logits: logits[:, :7]]}, r"logits_processors[0] returned shape (1, 7)"),
        ({"logits_processors": [lambda history, logits: logits * mx.nan]}, "no token is left to sample from"),
        ({"logits_processors": [lambda history, logits: None]}, "AttributeError"),
        ({"sampler": lambda logprobs: fails(None, logprobs)}, "ZeroDivisionError: planted"),
        ({"sampler": lambda logprobs: mx.array([10**7])}, "returned token 10000000, the vocabulary is 0 to 119"),
        ({"sampler": lambda logprobs: mx.array([-1])}, "returned token -1"),
        ({"sampler": lambda logprobs: mx.array([1, 2])}, "ValueError"),
        ({"sampler": lambda logprobs: "five"}, "AttributeError"),
    ],
)
def test_a_callable_of_a_request_fails(engine, right, fields, words):
    for index, each in enumerate(PROMPTS):
        engine.add_request(each, GREEDY.replace(**fields) if index == 1 else GREEDY)
    outputs = check_afterwards(engine, right, [1])
    assert words in outputs[1].error and outputs[1].token_ids == ()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_of_a_request_are_not_numbers(engine, right, monkeypatch, value):
    for each in PROMPTS:
        engine.add_request(each, GREEDY)
    engine.step()
    forward = engine.runner.forward

    def poisoned(packed):
        logits, launch = forward(packed)
        logits = np.array(logits.values)
        logits[1] = value
        return Logits.of(mx.array(logits)), launch

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "forward", poisoned)
        record = engine.step()
    assert list(record.finish_reasons.values()) == ["error"]
    outputs = check_afterwards(engine, right, [int(record.finished[0][1:])])
    assert [output.error for output in outputs if output.error] == [
        "the model returned logits that are not finite numbers"
    ]


def test_keys_and_values_that_are_not_numbers_are_not_found_again(engine, right):
    """NaN in the pool: blocks of the request that failed are in the prefix cache no more, and harm nobody."""
    attention = engine.model.model.model.layers[0].self_attn.v_proj
    good, bad = attention.weight, attention.weight * mx.nan
    mx.eval(bad)
    for each in PROMPTS[:3]:
        engine.add_request(each, GREEDY)
    attention.weight = bad
    try:
        record = engine.step()
    finally:
        attention.weight = good
    assert record.finished and engine.scheduler.kv_cache.block_pool.cached_blocks.keys() <= {
        block for table in record.block_tables.values() for block in table
    }
    for each in PROMPTS[3:]:
        engine.add_request(each, GREEDY)
    engine.run(progress=False)
    assert engine.scheduler.kv_cache.block_pool.num_free_blocks == CONFIG.num_usable_blocks
    for index, each in enumerate(PROMPTS):  # over the same blocks, whose stale contents are NaN
        again = engine.add_request(each, GREEDY)
        engine.run(progress=False)
        assert engine.output(again).token_ids == right[index]


def test_the_tokenizer_fails(engine, right, monkeypatch):
    for each in PROMPTS:
        engine.add_request(each, GREEDY)
    decode = engine.tokenizer.decode

    def broken(ids):
        if PROMPTS[0][-1] in ids:
            raise KeyError("no such token, planted")
        return decode(ids)

    with monkeypatch.context() as patch:
        patch.setattr(engine.tokenizer, "decode", broken)
        engine.step()
    hit = [i for i, output in enumerate(engine.outputs.values()) if output.finish_reason == "error"]
    assert 0 in hit
    outputs = check_afterwards(engine, right, hit)
    assert "the tokenizer failed: KeyError: 'no such token, planted'" in outputs[0].error
    assert outputs[0].token_ids == (), "the token whose text is missing is not part of the output"


# -- a listener fails ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("background", [False, True])
def test_a_listener_fails(engine, right, caplog, background):
    caplog.set_level(logging.ERROR, "workbench")
    seen = []
    engine.on_step(lambda record: fails(None, None))
    engine.on_step(lambda record: seen.append(record.step))
    for each in PROMPTS:
        engine.add_request(each, GREEDY)
    if background:
        engine.start()
        deadline = time.monotonic() + 60
        while engine.state != "idle" and time.monotonic() < deadline:
            time.sleep(0.01)
    check_afterwards(engine, right, [])
    assert seen == list(range(len(engine.trace)))
    assert caplog.messages[0] == "a listener failed in step 0"


# -- the client goes away ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
@pytest.mark.parametrize("phases", [0, 1, 2, 3], ids=lambda count: f"phase{count}")
def test_a_client_goes_away_at_any_moment(engine, right, steps, phases):
    """Before the first step, in its prompt, while it decodes; between steps, or between the phases of one."""
    ids = [engine.add_request(each, GREEDY) for each in PROMPTS]
    for _ in range(steps):
        engine.step()
    for _ in range(phases):
        engine.step_into(layers=False)
    gone = [ids[0], ids[3], ids[5]]
    for request_id in gone:
        engine.abort(request_id)
    engine.step()
    engine.step()
    engine.run(progress=False)
    for request_id, output, expected in zip(ids, engine.outputs.values(), right):
        if request_id in gone:
            assert output.finish_reason in ("abort", "length") and output.token_ids == expected[: len(output.token_ids)]
        else:
            assert output.token_ids == expected
    ended = [request_id for record in engine.trace for request_id in (*record.finished, *record.aborted)]
    assert sorted(ended) == sorted(ids)
    assert engine.scheduler.num_free_blocks == CONFIG.num_usable_blocks
    assert_laws(engine.scheduler)


def test_the_last_client_goes_away(engine):
    """Nothing is left to do, and a record says so all the same, or a reader of the records would wait endlessly."""
    ids = [engine.add_request(each, GREEDY) for each in PROMPTS[:2]]
    engine.step()
    for request_id in ids:
        engine.abort(request_id)
    record = engine.step()
    assert record.aborted == tuple(ids) and record.chunks == () and record.free_blocks == CONFIG.num_usable_blocks
    assert engine.step() is None


def test_an_engine_is_closed_in_the_middle_of_a_step(tiny_llama, right):
    with Engine(tiny_llama, CONFIG) as engine:
        engine.add_request(PROMPTS[0], GREEDY)
        engine.step_into()
        engine.step_into()
    engine.close()  # once more does no harm
    for use in (engine.step, lambda: engine.add_request(PROMPTS[1], GREEDY)):
        with pytest.raises(RuntimeError, match="this engine is closed"):
            use()
    with Engine(tiny_llama, CONFIG) as engine:
        engine.add_request(PROMPTS[0], GREEDY)
        assert engine.run(progress=False)[0].token_ids == right[0]


def test_engines_that_are_made_and_closed_leave_nothing_behind(tiny_llama, right):
    """Also those that cannot be made; counted are the threads of the operating system, MLX's own among them."""
    counts = []
    for _ in range(4):
        with pytest.raises(ValueError, match="max_model_len"):
            Engine(tiny_llama, CONFIG.replace(max_model_len=10**6))
        with pytest.raises(ValueError, match="num_blocks"):
            Engine(tiny_llama, CONFIG.replace(num_blocks=2**22, block_size=65536))
        with Engine(tiny_llama, CONFIG) as engine:
            engine.add_request(PROMPTS[0], GREEDY)
            assert engine.run(progress=False)[0].token_ids == right[0]
        gc.collect()
        counts.append(len(os.listdir("/proc/self/task")) if sys.platform == "linux" else threading.active_count())
    assert counts[-1] <= counts[1], counts  # threads of tests before may still end


# -- clocks jump ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("jump", [-86400.0 * 365, -5.0, 86400.0 * 365])
def test_the_wall_clock_jumps(engine, right, monkeypatch, tmp_path, jump):
    """An engine tells time by a clock that nobody sets."""
    for each in PROMPTS:
        engine.add_request(each, GREEDY)
    engine.step()
    wall = time.time
    monkeypatch.setattr(time, "time", lambda: wall() + jump)
    check_afterwards(engine, right, [])
    times = [record.time for record in engine.trace]
    assert times == sorted(times) and times[-1] < 600
    engine.trace.save(tmp_path / "t.jsonl")
    assert len(Trace.load(tmp_path / "t.jsonl")) == len(engine.trace)


def test_the_machine_sleeps_for_a_day(engine, right, monkeypatch, tmp_path):
    for each in PROMPTS:
        engine.add_request(each, GREEDY)
    engine.step()
    clock = time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + 86400)
    check_afterwards(engine, right, [])
    engine.trace.save(tmp_path / "t.jsonl")
    assert Trace.load(tmp_path / "t.jsonl").metrics().requests["r0"].e2e.seconds > 86000


# -- disks and signals, in separate processes ----------------------------------------------------------------------

PRELUDE = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1] / "support")!r})
import workbench
from trace_helpers import one_trace
from workbench.trace import Trace
"""

ON_A_FULL_DISK = """
import resource, signal
sys.dont_write_bytecode = True  # Python 3.11 would keep what is written of a module, and fail to import it ever after
path, old = sys.argv[1], open(sys.argv[1], "rb").read()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))  # the kernel refuses every byte after these
whole = one_trace()
try:
    whole.save(path)
except OSError as problem:
    print("save:", problem.strerror)
print("kept:", open(path, "rb").read() == old)

from word_llama import make_tiny_llama
from workbench import Engine, EngineConfig
with Engine(make_tiny_llama(), EngineConfig(num_blocks=40)) as engine:
    engine.trace.record_to(sys.argv[2])
    request_id = engine.add_request([5, 6, 7], max_tokens=20, ignore_eos=True)
    [output] = engine.run(progress=False)
    print("tokens:", len(output.token_ids), "steps:", len(engine.trace))
"""


def run_python(program, *arguments, **options):
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(program), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        **options,
    )
    return done


def test_a_full_disk(tmp_path):
    """Saving keeps the file that was there; recording ends, with a warning, and the run continues."""
    old, live = tmp_path / "old.jsonl", tmp_path / "live.jsonl"
    old.write_text("what was there before")
    done = run_python(ON_A_FULL_DISK, old, live)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["save: File too large", "kept: True", "tokens: 20 steps: 20"]
    assert "recording to" in done.stderr and "File too large" in done.stderr
    assert sorted(os.listdir(tmp_path)) == ["live.jsonl", "old.jsonl"]
    recorded = Trace.load(live)
    assert recorded.end == "cut" and recorded.problems


SAVE_FOR_EVER = """
whole = one_trace(25)
print("ready", flush=True)
while True:
    whole.save(sys.argv[1])
"""


@pytest.mark.repeats(step=2)
@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_killed_while_saving(tmp_path, name, how):
    """At the moment of its death the file is the one that was saved last, or the one before: never part of one."""
    path = tmp_path / name
    child = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + SAVE_FOR_EVER, str(path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout.readline() == "ready\n"
        deadline = time.monotonic() + 60
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        while time.monotonic() < deadline:  # until a file is being written
            if any(entry.name.startswith(".") for entry in os.scandir(tmp_path)):
                child.send_signal(how)
                break
        assert child.wait(timeout=60) == -how
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        child.stdout.close()
    saved = Trace.load(path)
    assert (len(saved), saved.problems) == (25, [])
    for left in tmp_path.glob(f".*-{name}"):  # what it was writing is read as far as it goes, if it has a first line
        with contextlib.suppress(ValueError):
            assert list(Trace.load(left)) == list(saved)[: len(Trace.load(left))]
