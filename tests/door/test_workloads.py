"""Logs of requests: units and block sizes are found or refused by name, and so is every column."""

import gzip
import json
import time

import pytest

from workbench import CostModel, read_access_log, simulate
from workbench.apps.cli import main
from workbench.simulation.access_log import is_access_log, read_log
from workbench.simulation.log_units import UNIT_NAMES


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def read(folder, text, name="log.jsonl", **options):
    path = folder / name
    path.write_text(text)
    return read_access_log(path, **options)


def shared(first, second):
    """Tokens that two prompts have in common at their beginning."""
    pairs = zip(first.prompt_token_ids, second.prompt_token_ids)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), len(first.prompt_token_ids))


def row(at, length, blocks=None, **more):
    hashed = {} if blocks is None else {"hash_ids": blocks}
    return {"timestamp": at, "input_length": length, "output_length": 5, **hashed, **more}


def blocks(length, size, first, rest):
    """Names of the blocks of a prompt; the first one is shared."""
    return [first, *range(rest, rest - (-length // size) - 1)]


def times(arrivals):
    return [round(arrival.arrives_at, 6) for arrival in arrivals]


@pytest.fixture(params=["UTC", "America/New_York", "Europe/Berlin"])
def zone(request, monkeypatch):
    """The time zone of the machine."""
    monkeypatch.setenv("TZ", request.param)
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


# -- units -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "at", "seconds", "more"),
    [
        (16, 30.0, 30.0, {}),
        (16, 61.114, 61.114, {"chat_id": 159, "parent_chat_id": -1, "type": "text", "turn": 2}),
        (16, 30, 30.0, {"chat_id": 159, "parent_chat_id": 55, "type": "text", "turn": 2}),
        (512, 3052, 3.052, {}),
        (512, 3052.0, 3.052, {}),
    ],
)
@pytest.mark.parametrize("length", [521, 1040, 2048])
def test_the_block_size_and_the_unit_of_a_published_trace(tmp_path, size, at, seconds, more, length):
    start = 0.0 if isinstance(at, float) else 0
    rows = [
        row(start, length, blocks(length, size, 1, 100), **more),
        row(at, length, blocks(length, size, 1, 500), **more),
    ]
    first, second = read(tmp_path, lines(*rows))
    assert times([first, second]) == [0.0, seconds] and (first.max_tokens, len(first.prompt_token_ids)) == (5, length)
    assert shared(first, second) == size


def test_hash_ids_of_whole_blocks_alone(tmp_path):
    """A file may name full blocks only; the rest of a prompt is its own."""
    rows = [
        row(at, length, [1, *range(n, n + length // 16 - 1)]) for at, length, n in ((0.0, 529, 50), (1.5, 541, 100))
    ]
    first, second = read(tmp_path, lines(*rows))
    assert shared(first, second) == 16 and len(second.prompt_token_ids) == 541


@pytest.mark.parametrize("extra", [{}, {"hash_ids": []}, {"hash_ids": None}])
def test_mooncake_without_hash_ids_counts_milliseconds(tmp_path, extra):
    assert times(read(tmp_path, lines({**row(0, 5), **extra}, {**row(3052, 7), **extra}))) == [0.0, 3.052]


def short(*at, size=10):
    return lines(*(row(each, size, [1]) for each in at))


AMBIGUOUS = {
    "short prompts": (short(0, 3000), {}, r"16 \(Qwen-Bailian's\) or 512 \(Mooncake's\).*--block-size 16 or"),
    "short prompts, one unit": (short(0, 0), {}, "--block-size 16 or --block-size 512"),
    "short prompts of other names": (lines(row(0, 5, [1]), row(40, 5, [2])), {}, "--time-unit s or --time-unit ms"),
    "blocks of 64": (
        lines(row(0, 640, list(range(10))), row(300, 640, list(range(10)))), {}, "seconds .*milliseconds .*--time-unit",
    ),
    "16 and whole numbers": (
        lines(row(0, 32, [1, 2]), row(30000, 32, [1, 3])), {}, "a span of 30000 s.*a span of 30 s.*--time-unit s",
    ),
    "512 and fractions": (lines(row(0.5, 600, [1, 2]), row(1.25, 600, [1, 3])), {}, "--time-unit"),
    "Mooncake's names and fractions": (lines(row(0.5, 600), row(1.25, 600)), {}, "--time-unit"),
    "a size that does not fit": (lines(row(0, 512, list(range(32))), row(9, 512, [1])), {}, "line 2: .*no block size"),
    "given, and does not fit": (lines(row(0, 512, list(range(32)))), {"block_size": 512}, "line 1: .*blocks of 512"),
    "no such unit": (short(0), {"time_unit": "minutes"}, "time_unit must be one of 's', 'ms'"),
    "no such size": (short(0), {"block_size": 0}, "block_size must be from 1"),
    "seconds for thirty years": (lines(row(0, 5), row(2e9, 5)), {}, "milliseconds .*microseconds .*--time-unit ms"),
    "times since 1970 in two units": (lines(row(17e8, 5), row(17e11, 5)), {}, "no unit makes both"),
}  # fmt: skip


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_two_readings_are_refused_with_the_option_that_decides(tmp_path, name):
    text, options, words = AMBIGUOUS[name]
    with pytest.raises(ValueError, match=words):
        read(tmp_path, text, **options)


@pytest.mark.parametrize(("unit", "seconds"), [("s", 30.0), ("ms", 0.03), ("us", 3e-5)])
@pytest.mark.parametrize("size", [16, 512, 10])
def test_options_decide(tmp_path, unit, seconds, size):
    first, second = read(tmp_path, short(0, 30), time_unit=unit, block_size=size)
    assert second.arrives_at == pytest.approx(seconds) and shared(first, second) == 10


@pytest.mark.parametrize(("unit", "start"), [("s", 1.7e9), ("ms", 1.7e12), ("us", 1.7e15), ("ns", 1.7e18)])
@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_times_since_1970(tmp_path, unit, start, suffix):
    factor = start / 1.7e9
    at = [int(start), int(start + 30 * factor)]
    names = ("arrival", "prompt_tokens", "output_tokens")
    table = "\n".join([",".join(names), *(f"{each},5,2" for each in at)])
    text = table if suffix == "csv" else lines(*(dict(zip(names, (each, 5, 2))) for each in at))
    assert times(read(tmp_path, text, f"log.{suffix}")) == [0.0, pytest.approx(30.0, abs=1e-3)]
    assert f"{UNIT_NAMES[unit]} since 1970" in str(read_log(tmp_path / f"log.{suffix}"))


NAMED_UNITS = {
    "arrival_ms": 3.052,
    "Timestamp (ms)": 3.052,
    "time_us": 0.003052,
    "arrival_s": 3052.0,
    "arrival": 3052.0,
}


@pytest.mark.parametrize(("column", "seconds"), NAMED_UNITS.items())
def test_a_unit_in_the_name_of_a_column(tmp_path, column, seconds):
    text = f"{column},input_tokens,output_tokens\n0,5,2\n3052,7,1\n"
    assert times(read(tmp_path, text, "log.csv")) == [0.0, seconds]


# -- dates -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dates", "seconds"),
    [
        (("2026-03-29 01:59:59.500000+01:00", "2026-03-29 03:00:00.500000+02:00"), 1.0),
        (("2024-11-03 01:30:00.25-04:00", "2024-11-03 01:30:00.75-05:00"), 3600.5),
        (("2024-05-10 00:00:00.009930+00:00", "2024-05-10 00:00:01+00:00"), 0.99007),
        (("2024-05-10 00:00:00.5+02:00", "2024-05-10 00:00:01.25+02:00"), 0.75),
        (("2023-11-16 18:15:46.6805900", "2023-11-16 18:15:47"), 0.31941),
        (("2024-03-10 01:59:59", "2024-03-10 03:00:00"), 3601.0),  # an hour that New York does not have
        (("2024-05-10T00:00:00.123456789Z", "2024-05-10T00:00:01Z"), 0.876544),
        (("2024-05-10 00:00:00 UTC", "2024-05-10 00:00:00.5 UTC"), 0.5),
        (("2024-05-10 00:00:00 +0200", "2024-05-09 22:00:01.5+00"), 1.5),
    ],
)
def test_dates_do_not_depend_on_the_machine(tmp_path, zone, dates, seconds):
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"{date},1,1\n" for date in dates)
    assert times(read(tmp_path, text, "azure.csv")) == [0.0, pytest.approx(seconds, abs=2e-6)]


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        (("2024-05-10 00:00:00", "2024-05-10 00:00:01+00:00"), "line 2: .*without an offset.*line 3: .*with an offset"),
        (("2024-05-10 00:00:00", "5"), "line 2: .*a date.*line 3: .*a number"),
        (("2024-05-10 00:00:00", "2024-05-10 25:00:00"), "line 3: TIMESTAMP must be seconds or a date"),
    ],
)
def test_mixed_times_are_refused(tmp_path, pair, words):
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"{date},1,1\n" for date in pair)
    with pytest.raises(ValueError, match=words):
        read(tmp_path, text, "azure.csv")


def test_a_unit_for_dates_is_refused(tmp_path):
    with pytest.raises(ValueError, match="time_unit 'ms' has no effect"):
        read(tmp_path, "time,input_tokens,output_tokens\n2024-05-10,1,1\n", "a.csv", time_unit="ms")


# -- columns -----------------------------------------------------------------------------------------------------------

OWN = {"arrival": 1.5, "prompt_tokens": 9, "output_tokens": 2}


@pytest.mark.parametrize(
    ("column", "words"),
    [("frobnicate", "it is unknown"), ("delay", "wait for the answer"), ("n", "one output"), ("lora_name", "share"),
     ("prompt_token_ids", "hash_ids"), ("num_images", "unknown")],
)  # fmt: skip
@pytest.mark.parametrize("suffix", ["jsonl", "csv", "json"])
def test_a_column_that_is_not_known_is_refused_by_name(tmp_path, column, words, suffix):
    rows = [OWN, {**OWN, column: 3}]
    text = lines(*rows) if suffix == "jsonl" else json.dumps(rows)
    if suffix == "csv":
        text = f"arrival,prompt_tokens,output_tokens,{column}\n1,9,2,\n2,9,2,3\n"
    with pytest.raises(ValueError, match=rf"(line 2|line 3|entry 2): {column} '?3'? is not supported: .*{words}"):
        read(tmp_path, text, f"log.{suffix}")


def test_labels_and_measured_values_are_harmless(tmp_path):
    labels = {"request_id": "a", "Model": "m", "Total tokens": 11, "Log Type": "x", "ttft": 3.5, "status": 200}
    assert len(read(tmp_path, lines({**OWN, **labels}))) == 1


def test_sessions_are_read(tmp_path):
    (arrival,) = read(tmp_path, lines({**OWN, "Session ID": None, "session_id": "s7"}))
    assert arrival.session == "s7"


# -- files -------------------------------------------------------------------------------------------------------------

TABLE = "arrival,prompt_tokens,output_tokens\n0,9,2\n1.5,4,1\n"
ROWS = lines(OWN, {**OWN, "arrival": 3.0})


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("name", "text"), [
    ("a.csv", TABLE), ("a.csv", TABLE.replace(",", ";").replace("\n", "\r\n")), ("a.tsv", TABLE.replace(",", "\t")),
    ("a.csv", TABLE.replace(",", "\t")), ("a.jsonl", ROWS),
    ("a.json", json.dumps([json.loads(line) for line in ROWS.splitlines()], indent=1)),
])  # fmt: skip
def test_encodings_compression_and_delimiters(tmp_path, encoding, packed, name, text):
    path = tmp_path / (f"{name}.gz" if packed else name)
    content = text.encode(encoding)
    path.write_bytes(gzip.compress(content) if packed else content)
    assert is_access_log(path)
    assert times(read_access_log(path)) == [0.0, 1.5]


@pytest.mark.parametrize("name", ["sharegpt.json", "sharegpt.json.gz", "sharegpt.jsonl"])
def test_sharegpt_as_it_is_published(tmp_path, name):
    turns = [{"from": "human", "value": "x" * 400}, {"from": "gpt", "value": "y" * 80}, {"from": "human", "value": "z"}]
    entries = [{"id": "a_0", "conversations": turns}, {"id": "b_0", "conversations": turns[:1]}]
    text = lines(*entries) if name.endswith("l") else json.dumps(entries)
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    assert is_access_log(path)
    log = read_log(path)
    (arrival,) = log.arrivals
    assert (arrival.arrives_at, len(arrival.prompt_token_ids), arrival.max_tokens) == (0.0, 100, 20)
    assert "no times in the file" in str(log) and "four characters" in str(log)
    with pytest.raises(ValueError, match="time_unit 's' has no effect"):
        read_access_log(path, "s")


def test_what_is_not_text_is_refused_by_name(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"arrival,prompt_tokens\xff,output_tokens\n")
    with pytest.raises(ValueError, match=r"a.csv is not text in UTF-8"):
        read_access_log(tmp_path / "a.csv")


def test_a_gzip_file_that_is_cut_off_is_not_read_as_a_shorter_one(tmp_path):
    path = tmp_path / "a.csv.gz"
    whole = gzip.compress("".join([TABLE, *(f"{at},{at},1\n" for at in range(2, 5000))]).encode())
    path.write_bytes(whole)
    assert len(read_access_log(path)) == 5000
    for end in (1, 8, 12, len(whole) // 2):
        path.write_bytes(whole[:-end])
        with pytest.raises(ValueError, match=r"a.csv.gz is a gzip file that is cut off|line \d+"):
            read_access_log(path)


def test_lines_without_anything_are_skipped(tmp_path):
    assert times(read(tmp_path, f"\n{ROWS}\n\n")) == [0.0, 1.5]


def test_an_unknown_key_of_a_conversation_is_refused(tmp_path):
    turns = [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]
    with pytest.raises(ValueError, match="line 2: weight 3 is not supported"):
        read(tmp_path, lines({"conversations": turns}, {"conversations": turns, "weight": 3}))


# -- the summary -------------------------------------------------------------------------------------------------------


def test_the_summary_says_what_was_understood(tmp_path):
    rows = [row(0, 1024, [1, 2]), row(2000, 1024, [1, 9]), row(4000, 512, [1])]
    read(tmp_path, lines(*rows))
    assert str(read_log(tmp_path / "log.jsonl")).splitlines() == [
        "log.jsonl: 3 requests in 4 s (0.75 per second); prompts of 512 to 1,024 tokens (mean 853.3), outputs of "
        "5 tokens; 40% of 2,560 prompt tokens repeat the beginning of an earlier prompt, in whole blocks of 512",
        "read as: times in milliseconds, as in Mooncake's traces; blocks of 512 tokens",
    ]


# -- commands ----------------------------------------------------------------------------------------------------------

WORKLOAD = {
    "requests": [
        {"id": f"r{index}", "prompt": {"parts": [{"len": 32, "seed": "s"}, {"len": 16}]}, "max_tokens": 4}
        | {"arrival_time": 0.5 * index}
        for index in range(3)
    ],
    "cost_model": {"fixed": 0.01},
}
SUMMARY = (
    "work.json: 3 requests in 1 s (3 per second); prompts of 48 tokens, outputs of 4 tokens; 44% of 144 prompt tokens "
    "repeat the beginning of an earlier prompt, in whole blocks of 16"
)


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize(
    "words", [["simulate"], ["fleet", "run"], ["fleet", "compare", "--routers", "random", "--jobs", "1"]]
)
def test_a_command_says_first_what_it_understood(tmp_path, capsys, indent, words):
    path = tmp_path / "work.json"
    path.write_text(json.dumps(WORKLOAD, indent=indent))
    command = [*words[:1], str(path)] if len(words) == 1 else [*words[:2], str(path), *words[2:]]
    assert main(command) == 0
    assert capsys.readouterr().out.splitlines()[0] == SUMMARY


@pytest.mark.parametrize("words", [["simulate"], ["fleet", "run"]])
def test_the_summary_compares_prompts_in_the_blocks_of_the_configuration(tmp_path, capsys, words):
    path = tmp_path / "work.json"
    path.write_text(json.dumps(WORKLOAD | {"config": {"block_size": 12}}))
    assert main([*words, str(path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "33% of 144 prompt tokens repeat the beginning of an earlier prompt, in whole blocks of 12" in said


def test_generated_requests_are_said_without_making_them(tmp_path, capsys):
    path = tmp_path / "work.json"
    arrivals = {"process": "poisson", "rate": 50}
    generate = {"num_requests": 20, "prompt": 9, "output": 3, "arrivals": arrivals}
    path.write_text(json.dumps({"generate": generate, "cost_model": {"fixed": 0.01}}))
    assert main(["simulate", str(path)]) == 0
    assert capsys.readouterr().out.startswith("work.json: 20 generated requests (poisson, 50 per second); prompts of 9")


def test_options_of_the_commands_that_read_logs(tmp_path, capsys):
    recording, log = tmp_path / "run.jsonl", tmp_path / "log.jsonl"
    requests = [
        {
            "id": f"r{index}",
            "prompt": {"len": 20 + 31 * index % 90},
            "max_tokens": 3 + index % 7,
            "arrival_time": 0.05 * index,
        }
        for index in range(40)
    ]
    simulate({"requests": requests}, cost_model=CostModel(fixed=0.01, per_prefill_token=1e-4, per_sequence=1e-3)).save(
        recording
    )
    log.write_text(short(0, 3000))
    costs = ["--cost-from", str(recording)]
    units = ["--time-unit", "ms", "--block-size", "16"]
    for command in (
        ["trace", "info", str(log)],
        ["trace", "whatif", str(log), *costs, "--set", "max_num_seqs=8"],
        ["trace", "tune", str(log), *costs, "--slo", "ttft_p99=9s", "--sweep", "max_num_seqs=8"],
        ["fleet", "run", str(log), *costs],
    ):
        assert main(command) == 2, command
        assert "give --block-size 16 or --block-size 512" in capsys.readouterr().err
        assert main([*command, *units]) == 0, command
        said = capsys.readouterr().out.splitlines()
        assert said[0].startswith("log.jsonl: 2 requests in 3 s (0.667 per second); prompts of 10 tokens"), command
        assert said[1] == "read as: times in milliseconds, as given; blocks of 16 tokens"
    for command in (["trace", "info", str(recording)], ["fleet", "run", str(recording)]):
        assert main([*command, "--time-unit", "ms"]) == 2
        assert "--time-unit ms has no effect" in capsys.readouterr().err
