"""Recordings of other tools: each key is read, harmless or refused by name, and the user can leave one out."""

import json

import msgspec
import pytest

from workbench import CostModel, read_access_log, simulate
from workbench.apps.cli import main
from workbench.simulation.access_log import read_log
from workbench.simulation.arrivals import read_mooncake
from workbench.simulation.request_log import read_request_log
from workbench.trace import TraceError
from workbench.trace.formats.kv_events import decode_batch
from workbench.trace.formats.scrapes import read_scrapes
from workbench.trace.formats.vcr import read_vcr

OWN = {"arrival": 1.5, "prompt_tokens": 9, "output_tokens": 2}
VCR = {"prompt_tokens": 40, "output_tokens": 3, "ttft_ms": 50.0, "itl_ms": [10.0, 14.0], "arrival_ms": 0.5}


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def spans(path, *attributes, seconds=1):
    """A file of spans with these attributes beside the lengths."""
    found = []
    for index, more in enumerate(attributes):
        given = {"gen_ai.usage.prompt_tokens": 30, "gen_ai.usage.completion_tokens": 4} | more
        typed = [
            {"key": key, "value": {"intValue": str(value)} if isinstance(value, int) else {"doubleValue": value}}
            for key, value in given.items()
            if value is not None
        ]
        times = {"startTimeUnixNano": f"{5 + index}000000000", "endTimeUnixNano": f"{5 + index + seconds}000000000"}
        found.append({"name": "llm_request", **times, "attributes": typed, "newField": 3})
    return write(path, {"resourceSpans": [{"scopeSpans": [{"spans": found}]}]})


# -- vllm-vcr --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("meta", "more", "words"),
    [
        ({}, {"mm_hashes": ["a"]}, "line 3: mm_hashes .*other images"),
        ({}, {"arrival_s": 0.5}, "line 3: arrival_s .*unknown here"),
        ({}, {"frobnicate": 0}, "line 3: frobnicate 0 .*--ignore-columns frobnicate"),
        ({"time_unit": "s"}, {}, "line 1: time_unit 's' .*unknown here"),
        ({"blocksize": 32}, {}, "line 1: blocksize 32"),
    ],
)
def test_an_unknown_key_of_a_recording_of_vllm_vcr(tmp_path, meta, more, words):
    path = write(tmp_path / "tap.jsonl", {"meta": {"block_size": 16, **meta}}, VCR, VCR | more)
    for read in (read_vcr, read_access_log, read_request_log):
        with pytest.raises(ValueError, match=words):
            read(path)
    name = next(iter(meta | more))
    assert len(read_access_log(path, ignore_columns=[name])) == 2


def test_the_keys_that_vllm_vcr_writes(tmp_path):
    meta = {"model": "m", "gpu": "g", "tp": 2, "max_num_seqs": 8, "source": "tap", "block_size": 16, "config_hash": "c"}
    meta |= {"vllm_version": "0.33.0", "ready_response_hex": "00"}
    more = {"itl_tokens": [1, 1], "itl_summary": None, "concurrency": 2, "mm_hashes": [], "output_token_ids": [1, 2, 3]}
    more |= {"itl_ctx": {"num_running": [1, 1], "prefill_tokens": [0, 0]}, "cached_tokens": 16, "finish_reason": "stop"}
    path = write(tmp_path / "tap.jsonl", {"meta": meta}, VCR | more)
    assert len(read_access_log(path)) == 1


# -- OTLP ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"gen_ai.request.n": 4}, "gen_ai.request.n 4 .*one output"),
        ({"gen_ai.usage.num_sequences": 2}, "gen_ai.usage.num_sequences 2 .*one output"),
        ({"gen_ai.usage.prompt_tokens_scale": 2}, "gen_ai.usage.prompt_tokens_scale 2 .*unknown"),
        ({"vendor.arrival_delay": 7}, "vendor.arrival_delay 7 .*--ignore-columns vendor.arrival_delay"),
        ({"gen_ai.usage.input_tokens": 31}, "prompt_tokens is 30, and gen_ai.usage.input_tokens is 31"),
        ({"gen_ai.latency.e2e": 812.5}, "e2e is 812.5, in a span of 1 s: it must be in seconds"),
        ({"gen_ai.latency.time_to_first_token": 95}, "time_to_first_token is 95, in a span of 1 s"),
    ],
)
def test_an_attribute_that_is_not_read(tmp_path, more, words):
    path = spans(tmp_path / "spans.json", {}, more)
    for read in (read_access_log, read_request_log):
        with pytest.raises(ValueError, match=f"line 1: .*{words}"):
            read(path)
    assert len(read_access_log(path, ignore_columns=list(more))) == 2


def test_labels_of_a_span_and_the_present_names_of_lengths(tmp_path):
    labels = {"gen_ai.request.n": 1, "gen_ai.request.top_p": 0.5, "gen_ai.latency.time_in_queue": 0.25}
    labels |= {"server.port": 8000, "gen_ai.request.max_tokens": 16, "gen_ai.latency.e2e": 0.9}
    newer = {"gen_ai.usage.prompt_tokens": None, "gen_ai.usage.completion_tokens": None}
    newer |= {"gen_ai.usage.input_tokens": 70, "gen_ai.usage.output_tokens": 8}
    first, second = read_access_log(spans(tmp_path / "spans.json", labels, newer))
    assert [len(each.prompt_token_ids) for each in (first, second)] == [30, 70] and second.max_tokens == 8


@pytest.mark.parametrize("kind", ["resourceMetrics", "resourceLogs"])
def test_other_signals_of_otlp_are_refused_by_name(tmp_path, capsys, kind):
    path = write(tmp_path / "signal.json", {kind: [{"resource": {}}]})
    assert main(["trace", "info", str(path)]) == 2
    said = capsys.readouterr().err
    assert kind in said and "spans" in said, said


def test_a_file_of_other_spans_says_which(tmp_path):
    span = {"name": "POST /v1/completions", "startTimeUnixNano": "5", "endTimeUnixNano": "6"}
    path = write(tmp_path / "spans.json", {"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]})
    with pytest.raises(ValueError, match=r"no span named llm_request.*POST /v1/completions"):
        read_access_log(path)


# -- KV events -------------------------------------------------------------------------------------------------------

STORED = {"type": "BlockStored", "block_hashes": [7], "token_ids": [1], "block_size": 16, "medium": "GPU"}


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ([1.5, [STORED | {"tenant": 3}], 0], "BlockStored: tenant 3 .*unknown"),
        ([1.5, [STORED], 0, 5], "too many values"),
        ([1.5, [["BlockRemoved", [7], "GPU", 0, "more"]], 0], "BlockRemoved has 4 fields, 3 are known"),
        ([1.5, [{"type": "BlockMoved", "block_hashes": [7]}], 0], "BlockMoved"),
        ([1.5, [["BlockMoved", [7]]], 0], "BlockMoved"),
    ],
)
def test_an_unknown_field_of_an_event(batch, words):
    with pytest.raises(TraceError, match=f"batch 0 holds no KV events.*{words}"):
        decode_batch(0, msgspec.msgpack.encode(batch))


@pytest.mark.parametrize("as_array", [False, True])
def test_the_fields_that_vllm_sends(as_array):
    more = {"parent_block_hash": None, "lora_id": None, "lora_name": "french", "extra_keys": [["french"]]}
    more |= {"group_idx": 1, "kv_cache_spec_kind": "full_attention", "kv_cache_spec_sliding_window": None}
    event = STORED | more
    if as_array:
        order = "type block_hashes parent_block_hash token_ids block_size lora_id medium lora_name extra_keys group_idx"
        event = [event[name] for name in (*order.split(), "kv_cache_spec_kind", "kv_cache_spec_sliding_window")]
    (decoded,) = decode_batch(0, msgspec.msgpack.encode([1.5, [event], 2])).events
    assert (decoded.block_hashes, decoded.medium, decoded.group_idx) == ([7], "GPU", 1)


# -- logs ------------------------------------------------------------------------------------------------------------


def test_mooncake_lines_are_checked(tmp_path):
    line = {"timestamp": 0, "input_length": 9, "output_length": 7}
    path = write(tmp_path / "trace.jsonl", line, line | {"delay": 30, "round": 2})
    with pytest.raises(ValueError, match="line 2: delay 30 is not supported"):
        list(read_mooncake(path))


@pytest.mark.parametrize(
    ("text", "names", "lengths"),
    [
        ("arrival,prompt_tokens,output_tokens,frob\n1,9,2,\n2,7,2,3\n", ["frob"], [9, 7]),
        ("arrival,prompt_tokens,input_tokens,output_tokens\n1,9,90,2\n2,7,70,2\n", ["input_tokens"], [9, 7]),
        ("arrival,prompt_tokens,input_tokens,output_tokens\n1,9,90,2\n2,7,70,2\n", ["PROMPT_TOKENS"], [90, 70]),
        ("arrival,start_time_ms,prompt_tokens,output_tokens\n1,9,9,2\n2,7,7,2\n", ["start_time_ms"], [9, 7]),
        ("arrival,arrival_ms,prompt_tokens,output_tokens\n2,7,7,2\n3,2,9,2\n", ["arrival"], [9, 7]),
        ("arrival,prompt_tokens,output_tokens,frob,Odd name\n1,9,2,,4\n2,7,2,3,\n", ["frob", "odd name"], [9, 7]),
    ],
)
def test_columns_are_left_out_as_asked(tmp_path, text, names, lengths):
    path = tmp_path / "log.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match="--ignore-columns"):
        read_access_log(path)
    assert [len(each.prompt_token_ids) for each in read_access_log(path, ignore_columns=names)] == lengths
    with pytest.raises(ValueError, match=r"--ignore-columns absent has no effect on .*no such column"):
        read_access_log(path, ignore_columns=[*names, "absent"])


def test_times_beside_conversations_are_not_dropped(tmp_path):
    turns = [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]
    path = write(tmp_path / "chats.jsonl", *({"timestamp": at, "conversations": turns} for at in (0, 30)))
    with pytest.raises(ValueError, match=r"line 1: timestamp 0 is not supported: .*arrive together"):
        read_log(path)
    assert len(read_log(path, ignore_columns=["timestamp"]).arrivals) == 2
    mixed = write(tmp_path / "mixed.jsonl", OWN, OWN | {"conversations": turns})
    with pytest.raises(ValueError, match=r"line 2: conversations .*a file holds conversations, or"):
        read_log(mixed)


@pytest.mark.parametrize(
    ("turns", "lengths"),
    [
        ([("system", "s" * 40), ("human", "q" * 40), ("gpt", "a" * 8)], (20, 2)),
        ([("gpt", "a" * 40), ("human", "q" * 80), ("gpt", "a" * 8)], (20, 2)),
        ([("user", "q" * 80), ("assistant", "a" * 8), ("user", "q")], (20, 2)),
        ([(None, "q" * 80), (None, "a" * 8)], (20, 2)),
    ],
)
def test_the_question_is_what_stands_before_the_first_answer(tmp_path, turns, lengths):
    found = [{"value": text} | ({} if role is None else {"from": role}) for role, text in turns]
    (arrival,) = read_access_log(write(tmp_path / "chats.jsonl", {"conversations": found}))
    assert (len(arrival.prompt_token_ids), arrival.max_tokens) == lengths


@pytest.mark.parametrize(
    ("turn", "words"),
    [
        ({"from": "narrator", "value": "x"}, r"conversations\[1\].from must be one of .*got 'narrator'"),
        ({"from": "gpt", "value": "x", "repeat": 3}, r"conversations\[1\]: repeat 3 is not supported"),
        ({"from": "gpt", "value": ["x"]}, r"conversations\[1\] must have a text"),
        ("x", r"conversations\[1\] must be an object"),
    ],
)
def test_a_turn_that_is_not_understood(tmp_path, turn, words):
    path = write(tmp_path / "chats.jsonl", {"conversations": [{"from": "human", "value": "x"}, turn]})
    with pytest.raises(ValueError, match=words):
        read_access_log(path)


def test_scrapes_in_milliseconds_are_refused(tmp_path):
    sample = 'vllm:generation_tokens_total{engine="0"}'
    path = tmp_path / "metrics.prom"
    path.write_text(f"# scraped 1780000000000\n{sample} 50\n# scraped 1780000005000\n{sample} 300\n")
    with pytest.raises(TraceError, match="scrape 1: its time must be in seconds since 1970"):
        read_scrapes(path)


def test_the_commands_take_the_option(tmp_path, capsys):
    recording = tmp_path / "run.jsonl"
    requests = [
        {"id": f"r{i}", "prompt": {"len": 20 + 31 * i % 90}, "max_tokens": 3 + i % 7, "arrival_time": 0.05 * i}
        for i in range(40)
    ]
    cost = CostModel(fixed=0.01, per_prefill_token=1e-4, per_sequence=1e-3)
    simulate({"requests": requests}, cost_model=cost).save(recording)
    log = write(tmp_path / "log.jsonl", OWN, OWN | {"arrival": 2.0, "frob": 1, "hop": 2})
    tap = write(tmp_path / "tap.jsonl", VCR, VCR | {"frob": 1, "hop": 2})
    for path in (log, tap):
        for command in (
            ["trace", "info", str(path)],
            ["trace", "whatif", str(path), "--cost-from", str(recording), "--set", "max_num_seqs=8"],
            ["fleet", "run", str(path), "--cost-from", str(recording)],
        ):
            assert main(command) == 2, command
            assert "line 2: frob 1 is not supported" in capsys.readouterr().err, command
            assert main([*command, "--ignore-columns", "frob,hop"]) == 0, command
            capsys.readouterr()
    assert main(["trace", "info", str(recording), "--ignore-columns", "frob"]) == 2
    assert "--ignore-columns frob has no effect" in capsys.readouterr().err


HEAD = "arrival,prompt_tokens,output_tokens"


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.csv", f"{HEAD}\n0,9,2,77\n", "line 2 has 4 values, and the first line names 3 columns"),
        (
            "a.csv",
            "arrival,prompt_tokens,Prompt_Tokens,output_tokens\n0,9,8,2\n",
            "two columns are named prompt_tokens",
        ),
        ("a.csv", "time,prompt_tokens,output_tokens\n20231116,9,2\n20231117,9,2\n", "dates such as 20231116 .*unit s"),
        ("a.csv", f"{HEAD},total_tokens\n0,9,2,11\n1,9,2,50\n", "line 3: total_tokens is '50', .*--ignore-columns tot"),
        ("a.jsonl", '{"arrival": 0, "prompt_tokens": 9, "prompt_tokens": 90}\n', "two values of 'prompt_tokens'"),
        ("a.jsonl", json.dumps({**OWN, "ttft_ms": 5, "rate": 3}), "line 1: rate 3 .*unknown"),
    ],
)
def test_what_would_be_dropped_in_silence_is_refused(tmp_path, name, text, words):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError, match=words):
        read_access_log(path)


@pytest.mark.parametrize(
    ("column", "seconds"),
    [
        ("arrival_sec", 5000),
        ("arrival [ms]", 5),
        ("arrival_msec", 5),
        ("arrival (milliseconds)", 5),
        ("time_usec", 0.005),
    ],
)
def test_words_for_units_in_the_name_of_a_column(tmp_path, column, seconds):
    path = tmp_path / "a.csv"
    path.write_text(f"{column},prompt_tokens,output_tokens,total_tokens\n0,9,2,11\n5000,7,2,9\n")
    assert [each.arrives_at for each in read_access_log(path)] == [0.0, pytest.approx(seconds)]


@pytest.mark.parametrize(
    ("arrivals", "words"),
    [
        ({"process": "at_once", "rate": 9}, "generate.arrivals.rate 9 has no effect on the process at_once"),
        ({"process": "poisson", "rate": 9, "size": 4}, "generate.arrivals.size 4 has no effect on the process poisson"),
    ],
)
def test_an_argument_of_another_process_is_refused(arrivals, words):
    generate = {"num_requests": 2, "prompt": 5, "output": 3, "arrivals": arrivals}
    with pytest.raises(ValueError, match=words):
        simulate({"generate": generate, "cost_model": {"fixed": 0.1}})
