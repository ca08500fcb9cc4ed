"""Tables about real models on a CPU: beside llama.cpp, their memory and starts, and activations of 8 bits."""

from __future__ import annotations

from benchmark_tables import load, number, spread, table


def llama_cpp_table() -> str:
    """One line per model, number of threads and scene, and the peak of memory of each."""
    rows, memory, repeats = [], [], []
    for name, model in load("llama_cpp")["models"].items():
        for threads, result in model["threads"].items():
            for scene, row in result["scenes"].items():
                for arm, activations in (("workbench", "float32"), ("workbench_int8", "int8")):
                    if arm not in row:
                        continue
                    ours, theirs = (number(row[side]["per_cpu_second"]["median"]) for side in (arm, "llama_cpp"))
                    cpu, wall = (spread(row[arm][f"ratio, per_{clock}_second"]) for clock in ("cpu", "wall"))
                    met = row[arm]["ratio, per_cpu_second"]["median"] >= row["target"]
                    verdict = f"{row['target']}" if met else f"{row['target']}, missed"
                    rows.append([name, threads, scene, activations, ours, theirs, cpu, wall, verdict])
            peaks = (f"{result['peak_mib_above_imports'][arm]:.0f}" for arm in ("workbench", "llama_cpp"))
            loads = (number(result["arms"][arm]["load"]["cpu_s"]) for arm in ("workbench", "llama_cpp"))
            memory.append([name, threads, f"{model['file_mib']:.0f}", *peaks, *loads])
            repeats.append(row["workbench"]["per_cpu_second"]["repeats"])
    machine = model["machine"]
    clocks = ["ratio, CPU", "ratio, wall", "target"]
    speeds = table(["model", "threads", "scene", "activations", "Workbench, tok per CPU s", "llama.cpp", *clocks], rows)
    head = [
        "model",
        "threads",
        "file, MiB",
        "Workbench, peak MiB",
        "llama.cpp",
        "Workbench, CPU s to load",
        "llama.cpp",
    ]
    times = f"{max(repeats)} repeats" if len(set(repeats)) == 1 else f"{min(repeats)} to {max(repeats)} repeats"
    note = f"{machine['processor']}, {machine['cores']} cores; medians of {times} in turn (ratios: range)."
    return f"{note}\n\n{speeds}\n\n{table(head, memory)}"


def models_table() -> str:
    """Memory and speed of each model, from the same runs as the comparison with llama.cpp."""
    rows = []
    for name, model in load("llama_cpp")["models"].items():
        for threads, result in model["threads"].items():
            sizes = (model["file_mib"], result["peak_mib_above_imports"]["workbench"])
            speeds = [number(row["workbench"]["per_cpu_second"]["median"]) for row in result["scenes"].values()]
            rows.append([name, threads, *(f"{size:.0f}" for size in sizes), *speeds])
    return table(["model", "threads", "file, MiB", "peak, MiB", *result["scenes"]], rows)


def starts_table() -> str:
    """Processor time, time to the first token and memory of each kind of start."""
    units = {"ready_cpu_s": 2, "first_token_cpu_s": 2, "first_token_wall_s": 2}
    rows = []
    for name, model in load("loading")["models"].items():
        for kind, start in model["starts"].items():
            seconds = [f"{start[key]['median']:.{digits}f}" for key, digits in units.items()]
            memory = f"{start['peak_mib_above_imports']['median']:.0f}"
            rows.append([name, kind.replace("llama_cpp", "llama.cpp"), *seconds, memory])
    head = ["ready, CPU s", "first token, CPU s", "first token, s", "peak above imports, MiB"]
    return table(["model", "start", *head], rows)


def quality_table() -> str:
    """The error of activations of 8 bits."""
    result = load("int8_quality")
    names = {"float32": "float32", "int8": "int8", "llama_cpp": "llama.cpp"}
    rows = [
        [
            names[arm],
            f"{row['perplexity']:.2f}",
            f"{row['mean_divergence']:.4f}",
            f"{row['divergence_p99']:.3f}",
            f"{row['same_top_token']:.1%}",
        ]
        for arm, row in result["arms"].items()
    ]
    head = ["activations", "perplexity", "mean divergence, nats", "P99", "same most likely token"]
    return f"{result['model']}, {result['tokens']:,} tokens of Python's help.\n\n{table(head, rows)}"
