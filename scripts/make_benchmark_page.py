"""Write the numbers and figures of docs/benchmarks.md: ``python scripts/make_benchmark_page.py``.

The text of the page is written by hand, and so is that of docs/models.md and docs/predictions.md, which show some of
the numbers. This script writes every number, between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``. ``--check``
compares instead of writing, but for the marks of results that are older than their code: every commit may add some.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from benchmark_figures import ARM_NAMES, WATCHED_NAMES, arena_figure, chunk_size_figure, serving_figure, watched_figure
from benchmark_origins import origins, script_of
from benchmark_tables import Result, cell, load, loaded, number, provenance, spread, table
from generated_files import write_or_check
from model_tables import llama_cpp_table, models_table, quality_table, starts_table
from summary_tables import checkouts_summary, llama_cpp_summary, losses, served_summary, serving_summary

ROOT = Path(__file__).parent.parent
MODELS_PAGE, PREDICTIONS_PAGE = ROOT / "docs" / "models.md", ROOT / "docs" / "predictions.md"
PAGE, IMAGES = ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "images"

SERVING_ROWS = {
    "duration_s": "duration, s",
    "cpu_s": "CPU time, s",
    "forward_passes": "forward passes",
    "rows_computed": "rows of tokens computed",
    "requests_per_s": "requests per s",
    "output_tokens_per_s": "output tokens per s",
    "total_tokens_per_s": "total tokens per s",
    **{
        f"{statistic}_{name}_s": f"{title}, {statistic if statistic != 'p99' else 'P99'}, {unit}"
        for name, title, unit in (
            ("ttft", "TTFT", "s"),
            ("queue", "queue", "s"),
            ("prefill", "prefill", "s"),
            ("tpot", "TPOT", "ms"),
            ("itl", "ITL", "ms"),
        )
        for statistic in ("mean", "median", "p99")
    },
}
OTHER_WORKLOADS = ("sharegpt", "long_prompt", "decode_only", "prefix_heavy")
OTHER_COLUMNS = (
    "duration_s",
    "cpu_s",
    "rows_computed",
    "output_tokens_per_s",
    "mean_ttft_s",
    "mean_tpot_s",
    "p99_itl_s",
)


def serving_table() -> str:
    """The serving table: one column per arm, all rows, and the comparison of the outputs."""
    result = load("serving_random_small")
    arms = result["arms"]
    rows = [[title, *(cell(row, values) for values in arms.values())] for row, title in SERVING_ROWS.items()]
    rows.append(["outputs equal to those with float32 weights", *(_equal(result, arm) for arm in arms)])
    repeats = next(iter(arms.values()))["cpu_s"]["repeats"]
    return (
        f"{result['workload']['what']}, arrivals at {result['workload']['rate']:g} per second, "
        f"{result['workload']['concurrency']} open at once, steps of {result['workload']['token_budget']} tokens; "
        f"{provenance(result, repeats)}.\n\n{table(['measure', *(ARM_NAMES[arm] for arm in arms)], rows)}"
    )


def _equal(result: Result, arm: str) -> str:
    compared = result["outputs_compared_with_float32"].get(arm)
    return f"{compared['equal']} of {compared['requests']}" if compared else ""


def ratio_list() -> str:
    """Workbench over other arms: the median of the repeats' ratios, minimum and maximum in brackets."""
    names = {"duration_s": "duration", "cpu_s": "CPU time", "mean_ttft_s": "mean TTFT", "p99_itl_s": "P99 ITL"}
    rows = []
    for pair, ratios in load("serving_random_small")["ratios"].items():
        ours, theirs = pair.split(" / ")
        rows.append([f"{ARM_NAMES[ours]} over {ARM_NAMES[theirs]}", *(spread(ratios[row]) for row in names)])
    return table(["pair", *names.values()], rows)


def other_workloads() -> str:
    """Selected rows of the other workloads, one line per arm."""
    return "\n\n".join(
        arm_table(name.replace("_", " "), load(f"serving_{name}_small"), OTHER_COLUMNS) for name in OTHER_WORKLOADS
    )


def full_size() -> str:
    """Random prompts, with rows that other programs do not change, and prompts of lines, with latencies."""
    random = arm_table("full size", load("serving_random"), ("cpu_s", "forward_passes", "rows_computed"))
    return f"{random}\n\n{arm_table('sonnet', load('serving_sonnet'), ('forward_passes', *OTHER_COLUMNS))}"


def arm_table(title: str, result: Result, columns: Sequence[str]) -> str:
    """Selected rows of a serving benchmark, one line per arm, and the comparison of the outputs."""
    arms = result["arms"]
    rows = [
        [ARM_NAMES[arm], *(cell(column, values) for column in columns), _equal(result, arm)]
        for arm, values in arms.items()
    ]
    repeats = next(iter(arms.values()))["cpu_s"]["repeats"]
    head = [title, *(SERVING_ROWS[column] for column in columns), "equal outputs"]
    return f"{result['workload']['what']}; {provenance(result, repeats)}.\n\n{table(head, rows)}"


def chunk_size_table() -> str:
    """One line per token budget."""
    result = load("chunk_size_small")
    names = ("output_tokens_per_s", "cpu_s", "forward_passes", "mean_ttft_s", "median_itl_s", "p99_itl_s")
    budgets = result["budgets"]
    rows = [[budget, *(cell(name, row) for name in names)] for budget, row in budgets.items()]
    repeats = next(iter(budgets.values()))["cpu_s"]["repeats"]
    head = ["token budget", *(SERVING_ROWS[name] for name in names)]
    return f"{result['workload']['what']}; {provenance(result, repeats)}.\n\n{table(head, rows)}"


def watched_table() -> str:
    """One line per arm."""
    result = load("watched")
    rows = []
    for arm, name in WATCHED_NAMES.items():
        row, ratio = result["arms"][arm], result["cpu_over_record_on"][arm]
        rows.append([name, cell("cpu_s", row), cell("output_tokens_per_s", row), spread(ratio) if arm != "on" else "1"])
    head = ["recording", "CPU time, s", "output tokens per s", "CPU time over record on"]
    repeats = result["arms"]["on"]["cpu_s"]["repeats"]
    return f"{result['workload']}; {provenance(result, repeats)}.\n\n{table(head, rows)}"


PREDICTED = {
    "duration": "duration",
    "ttft_mean": "TTFT mean",
    "ttft_p50": "TTFT P50",
    "ttft_p99": "TTFT P99",
    "tpot_mean": "TPOT mean",
    "tpot_p99": "TPOT P99",
    "e2e_mean": "E2E mean",
    "e2e_p99": "E2E P99",
}


def prediction_table(*names: str) -> str:
    """The error of each prediction; a miss is bold, and each kind ends with the difference of vLLM to itself."""
    lines, paragraphs = [], []
    for name in names:
        result = load(name)
        rows = result["rows"]
        for index, row in enumerate(rows):
            title = "the recorded setting" if row["setting"] == "itself" else row["setting"]
            lines.append([row["kind"], title, *(_error(row[value]) for value in PREDICTED)])
            is_last = index + 1 == len(rows) or rows[index + 1]["kind"] != row["kind"]
            if is_last and row["e2e_mean"]["vllm_itself"]:  # 0 if the setting was not run twice
                itself = [f"{row[value]['vllm_itself']:+.1%}" if value != "duration" else "" for value in PREDICTED]
                lines.append([row["kind"], "*vLLM, run twice*", *(f"*{text}*" if text else "" for text in itself)])
        summary, kinds = result["summary"], list(dict.fromkeys(row["kind"] for row in rows))
        paragraphs.append(
            f"{'; '.join(kinds)}: median absolute error {summary['median_error']:.1%} in {summary['cases']} cases; "
            f"{summary['hits']:.0%} hits; {summary['inside']:.0%} of the measured values inside their intervals; the "
            f"setting with the best prediction is at most {summary['largest_regret']:.1%} above the best measured one."
        )
    text = "\n".join(f"- {paragraph}" for paragraph in paragraphs)
    return f"{text}\n\n{table(['accelerator', 'setting', *PREDICTED.values()], lines)}"


def _error(value: Result) -> str:
    return f"{value['error']:+.1%}" if value["hit"] else f"**{value['error']:+.1%}**"


PAIR_NAMES = {
    "copy": "texts that repeat, n-gram",
    "copy_2": "the same",
    "copy_3": "the same",
    "copy_4": "the same",
    "copy_8": "the same",
    "copy_16": "the same, 16 requests at once, n-gram",
    "wrong": "always wrong, adaptive",
    "wrong_fixed": "always wrong",
    "draft_layers": "texts that repeat, the model's first 10 layers",
    "async": "asynchronous steps, 16 requests",
}
"""The second engine of each pair, as the page names it."""


def speculation_table() -> str:
    """One line per pair."""
    result = load("speculation")
    rows = []
    for pair, name in PAIR_NAMES.items():
        row = result["pairs"][pair]
        drafts = row["num_speculative_tokens"]
        accepted = f"{row['accepted_per_draft']:.0%}" if drafts else ""
        clocks = (number(row[f"times_as_fast_{clock}"]) for clock in ("cpu", "wall"))
        rows.append([name, str(drafts or ""), accepted, number(row["tokens_per_step"][pair]), *clocks])
    head = ["prompts, drafts", "drafts per step, up to", "accepted", "tokens per step", "times as fast, CPU", "wall"]
    machine, threads = result["machine"], result["threads"]
    where = f"{machine['processor']}, {threads} thread" + "s" * (threads > 1)
    return (
        f"{result['model']}; {where}; medians of the ratios of each repeat.\n\n{table(head, rows)}\n\n"
        f"CPU time of a forward pass (`bench_runner.py`):\n\n{rows_table()}"
    )


def rows_table() -> str:
    """CPU time of one request's forward pass by its rows."""
    result = load("runner")
    scenes = {1: "1 decode at 128"} | {rows: f"1 decode of {rows} rows at 128" for rows in (2, 3, 4, 5, 6, 8)}
    times = [result[scene]["compiled step, ms"]["median"] for scene in scenes.values()]
    head = ["rows of one request", *map(str, scenes)]
    return table(head, [["ms", *map(number, times)], ["times that of 1 row", *(number(t / times[0]) for t in times)]])


def other_scripts() -> str:
    """One number from each of the remaining result files."""
    return table(
        ["measurement", "result", "script"],
        [[what, read(load(name)), f"`{script_of(name).name}`"] for name, what, read in OTHER_RESULTS],
    )


def growth_found(commands: Result) -> str:
    """The commands with the smallest and the largest growth of CPU time, and the largest growth of memory."""
    cpu = {name: row["growth"]["cpu"] for name, row in commands.items()}
    least, most = min(cpu, key=cpu.__getitem__), max(cpu, key=cpu.__getitem__)
    memory = max(row["growth"]["memory"] for row in commands.values())
    return f"{number(cpu[least])} ({least}) to {number(cpu[most])} ({most}); at most {number(memory)}"


def hour_found(commands: Result) -> str:
    """CPU time and peak memory of each command on an hour of a server."""
    seconds = ", ".join(number(row["this"]["cpu_s"]["median"]) for row in commands.values())
    return f"{seconds}; {', '.join(str(row['this']['peak_mb']) for row in commands.values())}"


def stalls_found(kinds: Result, *, planted: bool) -> str:
    """The answers about all processes with a planted stall, or without."""
    counts = [count for kind, count in kinds.items() if (kind != "none") is planted]
    total = {name: sum(count[name] for count in counts) for name in counts[0]}
    if not planted:
        return f"{total['claimed, and not late']} in {total['steps']:,} steps"
    return f"{total['named']} of {total['cases']}; {total['requests blamed']} of {total['requests hit']:,}"


OTHER_RESULTS: list[tuple[str, str, Callable[[Result], str]]] = [
    (
        "engine",
        "16 requests that all arrive at the start: CPU time over mlx-lm, float32 weights, same BLAS",
        lambda result: number(result["ratios"]["workbench / mlx_lm, cpu_s"]["median"]),
    ),
    (
        "engine",
        'the same requests: CPU time over that with `weights="float32"`',
        lambda result: number(result["ratios"]["workbench / workbench_float32_weights, cpu_s"]["median"]),
    ),
    (
        "engine",
        'the same with `activations="int8"`',
        lambda result: number(result["ratios"]["workbench_int8 / workbench_float32_weights, cpu_s"]["median"]),
    ),
    (
        "attention",
        "attention of one layer, CPU kernel: speedup over gathering the KV in MLX (24 decodes, 2 chunks)",
        lambda result: number(next(iter(result["attention"].values()))["gather_over_cpu"]),
    ),
    (
        "scheduler",
        "scheduling, updating and recording: µs per scheduled request (256 decodes)",
        lambda result: number(result["scenes"]["256 decodes"]["microseconds_per_scheduled_request"]["total"]["median"]),
    ),
    (
        "recording",
        "creating and storing the record: share of the CPU time of pure decode steps",
        lambda result: f"{100 * result['share_of_decode_steps']['median']:.2f}%",
    ),
    (
        "simulation",
        "simulated requests scheduled per CPU second, no prefix caching",
        lambda result: number(next(iter(result["cases"].values()))["scheduled_per_cpu_second"]),
    ),
    (
        "stalls",
        "stalls planted into real processes (sleep, garbage collection, SIGSTOP): named; requests blamed for them",
        lambda result: stalls_found(result["kinds"], planted=True),
    ),
    (
        "stalls",
        "as many processes without one: stalls claimed in steps that were not late by the process's clock",
        lambda result: stalls_found(result["kinds"], planted=False),
    ),
    (
        "recordings_saved",
        "an hour of a server: CPU time of `trace info`, `html` and `whatif`, s; peak memory of each, MB",
        lambda result: hour_found(result["commands"]),
    ),
    (
        "recordings_long",
        "ten hours of a server, 200,000 steps: peak memory of the largest process of `trace whatif`, MB",
        lambda result: str(result["commands"]["whatif"]["10000 requests"]["peak_mb"]),
    ),
    (
        "recordings_growth",
        "200,000 recorded steps against 22,000: CPU time of the commands, and memory, per step",
        lambda result: growth_found(result["commands"]),
    ),
    (
        "dashboard",
        "browser time per update, 64 requests and 16,384 blocks, ms",
        lambda result: number(result["live_64_requests_16384_blocks"]["browser_ms_per_update"]),
    ),
    (
        "dashboard",
        "first picture and sentence of the demo after its address is printed, s",
        lambda result: number(result["first_picture"]["seconds"]),
    ),
]

MODELS_SECTIONS: dict[str, Callable[[], str]] = {
    "quality": quality_table,
    "memory and speed": models_table,
    "starts": starts_table,
}

PREDICTIONS_SECTIONS: dict[str, Callable[[], str]] = {
    "predictions": lambda: prediction_table("prediction", "prediction-async", "prediction-cpu", "prediction-cpu-async"),
    "predictions of sessions": lambda: prediction_table("prediction-sessions-repeated"),
}
SECTIONS: dict[str, Callable[[], str]] = {
    "losses": losses,
    "ships llama.cpp": llama_cpp_summary,
    "ships served": served_summary,
    "ships mlx-lm": serving_summary,
    "ships version 0.1": checkouts_summary,
    "serving": serving_table,
    "serving ratios": ratio_list,
    "other workloads": other_workloads,
    "full size": full_size,
    "chunk size": chunk_size_table,
    "watched": watched_table,
    "llama.cpp": llama_cpp_table,
    "speculation": speculation_table,
    "other scripts": other_scripts,
}
ORIGINS = "origins"
"""The last section of the page: the origins of everything above."""


def files() -> Iterator[tuple[Path, str]]:
    """Every file with its expected content."""
    yield IMAGES / "bench-serving.svg", serving_figure(load("serving_random_small"))
    yield IMAGES / "bench-chunk-size.svg", chunk_size_figure(load("chunk_size_small"))
    yield IMAGES / "bench-watched.svg", watched_figure(load("watched"))
    yield IMAGES / "bench-arena.svg", arena_figure(load("cache_arena"))
    pages = ((PAGE, SECTIONS), (MODELS_PAGE, MODELS_SECTIONS), (PREDICTIONS_PAGE, PREDICTIONS_SECTIONS))
    for page, sections in pages:
        text = page.read_text()
        kept = text if "--check" in sys.argv else None
        last = {ORIGINS: partial(origins, kept)} if page == PAGE else {}
        loaded.clear()
        for name, make in {**sections, **last}.items():
            begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
            filled = f"{begin}\n{make()}\n{end}"
            text, count = re.subn(f"{re.escape(begin)}.*?{re.escape(end)}", lambda _: filled, text, flags=re.DOTALL)  # noqa: B023
            if count != 1:
                raise ValueError(f"{page.name} must contain {begin!r} and {end!r} exactly once, found {count}")
        yield page, text


def main() -> int:
    """Write the files or check them."""
    return write_or_check(__doc__.splitlines()[0], files(), "benchmarks/results")


if __name__ == "__main__":
    raise SystemExit(main())
