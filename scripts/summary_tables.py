"""The first tables of docs/benchmarks.md: what ships beside other engines, and where it loses.

Every ratio here is Workbench's cost over the other's, processor time unless a column says otherwise: below 1 is a gain.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from benchmark_tables import Result, load, number, spread, table

ACTIVATIONS = {"workbench": "float32", "workbench_int8": "int8"}
SERVED_COLUMNS = {
    "cpu_ms_per_token": "CPU time per token",
    "ttft_mean_s": "TTFT, mean",
    "ttft_p99_s": "TTFT, P99",
    "itl_p99_s": "ITL, P99",
}
SERVING_COLUMNS = {"cpu_s": "CPU time", "duration_s": "duration", "mean_ttft_s": "TTFT, mean", "p99_itl_s": "ITL, P99"}
SERVING_WORKLOADS = ("random", "sharegpt", "long_prompt", "decode_only", "prefix_heavy")
CHECKOUTS = ("checkouts", "checkouts_engine", "checkouts_serving")
TOLERANCE = 1.03
"""Ratios up to this one differ by less than the same code measured twice."""


class Comparison(NamedTuple):
    """One cost of Workbench over another's.

    Attributes:
        what: The measurement.
        against: The other engine or version.
        ratio: Median, minimum, maximum and number of repeats; a cost, so above 1 Workbench loses.
        script: The script in benchmarks/, without ``bench_``.
    """

    what: str
    against: str
    ratio: Result
    script: str


def inverse(ratio: Result) -> Result:
    """The ratio of costs from a ratio of speeds."""
    return {
        "median": 1 / ratio["median"],
        "min": 1 / ratio["max"],
        "max": 1 / ratio["min"],
        "repeats": ratio["repeats"],
    }


def llama_cpp() -> Iterator[tuple[str, str, str, Comparison]]:
    """Model, activations and scene of each comparison on one thread."""
    for model, measured in load("llama_cpp")["models"].items():
        for scene, row in measured["threads"]["1"]["scenes"].items():
            for arm, activations in ACTIVATIONS.items():
                ratio = inverse(row[arm]["ratio, per_cpu_second"])
                what = f"{model}, {scene}, {activations} activations"
                yield model, activations, scene, Comparison(what, "llama.cpp", ratio, "llama_cpp")


def llama_cpp_summary() -> str:
    """One line per file and type of activations, one column per scene."""
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for model, activations, scene, comparison in llama_cpp():
        lines.setdefault((model, activations), {})[scene] = spread(comparison.ratio)
    scenes = list(next(iter(lines.values())))
    rows = [[*key, *(cells[scene] for scene in scenes)] for key, cells in lines.items()]
    return table(["file", "activations", *scenes], rows)


def served() -> Iterator[tuple[tuple[str, str, str], str, Comparison]]:
    """File, sampling and activations, and the column of each comparison of servers."""
    for model, measured in load("served")["models"].items():
        for sampling, arms in measured["scenes"].items():
            for arm, activations in ACTIVATIONS.items():
                for key, title in SERVED_COLUMNS.items():
                    what = f"{model}, served to 16 streams, {sampling}, {activations} activations: {title}"
                    comparison = Comparison(what, "llama-server", arms[arm][key]["ratio"], "served")
                    yield (model, sampling, activations), title, comparison


def served_summary() -> str:
    """One line per file, sampling and type of activations; the last column is the peak of resident memory."""
    lines: dict[tuple[str, str, str], dict[str, str]] = {}
    for key, title, comparison in served():
        lines.setdefault(key, {})[title] = spread(comparison.ratio)
    models, arms = load("served")["models"], {activations: arm for arm, activations in ACTIVATIONS.items()}
    rows = []
    for (model, sampling, activations), cells in lines.items():
        peaks = models[model]["peak_mib"]
        memory = f"{peaks[arms[activations]]:.0f} / {peaks['llama_cpp']:.0f}"
        rows.append([model, sampling, activations, *cells.values(), memory])
    return table(["file", "sampling", "activations", *SERVED_COLUMNS.values(), "peak, MiB"], rows)


def serving() -> Iterator[tuple[str, str, Comparison]]:
    """Workload, column and comparison of what ships with mlx-lm, in process and over HTTP."""
    for workload in SERVING_WORKLOADS:
        ratios = load(f"serving_{workload}_small")["ratios"]
        for pair, where in (("workbench / mlx_lm", "engine"), ("workbench_http / mlx_lm_http", "server")):
            for key, title in SERVING_COLUMNS.items():
                what = f"{workload.replace('_', ' ')}, {where}: {title}"
                yield (
                    f"{workload.replace('_', ' ')}, {where}",
                    title,
                    Comparison(what, "mlx-lm", ratios[pair][key], "serving"),
                )


def serving_summary() -> str:
    """One line per workload, engine and server."""
    lines: dict[str, dict[str, str]] = {}
    for name, title, comparison in serving():
        lines.setdefault(name, {})[title] = spread(comparison.ratio)
    return table(["workload", *SERVING_COLUMNS.values()], [[name, *cells.values()] for name, cells in lines.items()])


def measured_on_both() -> dict[str, Result]:
    """Every measurement of this version and the last one, the newest of each."""
    return {what: row for name in CHECKOUTS for what, row in load(name)["measurements"].items()}


def checkouts() -> Iterator[Comparison]:
    """Every cost of this version over that of the last one; tokens per second are not a cost."""
    for what, row in measured_on_both().items():
        ratio = {"median": row["ratio"], "min": row["ratio"], "max": row["ratio"], "repeats": 1}
        yield Comparison(
            what, "version 0.1", inverse(ratio) if "per_s" in what or "per s" in what else ratio, "checkouts"
        )


def checkouts_summary() -> str:
    """One line per measurement."""
    rows = [
        [what, *(number(row[side]["median"]) for side in ("this", "other")), f"{row['ratio']:.2f}"]
        for what, row in measured_on_both().items()
    ]
    return table(["measurement", "this version", "version 0.1", "ratio"], rows)


def losses() -> str:
    """Every comparison that Workbench loses, the worst first."""
    everything = [
        *(comparison for *_, comparison in llama_cpp()),
        *(comparison for *_, comparison in served()),
        *(comparison for *_, comparison in serving()),
        *checkouts(),
    ]
    lost = sorted((one for one in everything if one.ratio["median"] > TOLERANCE), key=lambda one: -one.ratio["median"])
    rows = [[one.what, one.against, spread(one.ratio), f"`bench_{one.script}.py`"] for one in lost]
    head = f"{len(lost)} of {len(everything)} comparisons."
    return f"{head}\n\n{table(['what', 'against', 'ratio', 'script'], rows)}"
