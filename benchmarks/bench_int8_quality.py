"""The error of activations of 8 bits: logits beside those with float32 activations, and llama.cpp's.

The text is that of Python's help, cut into windows of 256 tokens; every position of a window counts. A divergence is
the Kullback-Leibler divergence of the next token's distribution from that with float32 activations, in nats.

    python benchmarks/bench_int8_quality.py                       # the bundled SmolLM2: about 2 minutes
    python benchmarks/bench_int8_quality.py --llama PYTHON        # llama.cpp too; its inputs have 8 bits always

PYTHON is a Python with llama-cpp-python and NumPy.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
from _common import save
from bench_llama_cpp import file_of

WINDOW = 256
TOPICS = ("exceptions", "objects", "typesseq", "formatstrings", "class", "debugger")


def windows_of(token_ids: list[int], count: int) -> np.ndarray:
    """Windows of the text, int64 [count, WINDOW]."""
    if len(token_ids) < count * WINDOW:
        raise ValueError(f"the text has {len(token_ids)} tokens: choose --windows from 1 to {len(token_ids) // WINDOW}")
    return np.array(token_ids[: count * WINDOW]).reshape(count, WINDOW)


def workbench_logits(path: str, count: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The windows, and their logits with each kind of activations, float32 [count * WINDOW, vocab_size]."""
    import mlx.core as mx

    from workbench.models import load_model
    from workbench.models.packed.activations import float32_activations

    loaded = load_model(path, activations="int8")
    windows = windows_of(loaded.tokenizer.encode("\n".join(topics[name] for name in TOPICS)), count)

    def run() -> np.ndarray:
        return np.concatenate([np.array(loaded.model(mx.array(window[None])))[0] for window in windows])

    with float32_activations(loaded.model):
        exact = run()
    return windows, {"float32": exact, "int8": run()}


def llama_cpp_logits(path: str, windows: np.ndarray) -> np.ndarray:
    """The same logits by llama.cpp, with a cache of 32 bits."""
    import ctypes

    import llama_cpp

    llama_cpp.llama_backend_init()
    quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = windows.shape[1]
    params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
    context = llama_cpp.llama_init_from_model(model, params)
    vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    batch, rows = llama_cpp.llama_batch_init(windows.shape[1], 0, 1), []
    for window in windows:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        batch.n_tokens = len(window)
        for index, token in enumerate(window):
            batch.token[index], batch.pos[index] = int(token), index
            batch.n_seq_id[index], batch.seq_id[index][0], batch.logits[index] = 1, 0, True
        status = llama_cpp.llama_decode(context, batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        for index in range(len(window)):
            logits = llama_cpp.llama_get_logits_ith(context, index)
            rows.append(np.ctypeslib.as_array(logits, shape=(vocab_size,)).copy())
    return np.array(rows)


def compare(logits: np.ndarray, exact: np.ndarray, windows: np.ndarray) -> dict[str, float]:
    """Perplexity of the text, divergence from exact logits, and how often the most likely token is the same."""
    divergence, same, surprise = [], 0, []
    for window, token_ids in enumerate(windows):
        rows = slice(window * WINDOW, (window + 1) * WINDOW)
        ours, theirs = log_softmax(logits[rows]), log_softmax(exact[rows])
        divergence.append((np.exp(theirs) * (theirs - ours)).sum(axis=1))
        same += int((ours.argmax(axis=1) == theirs.argmax(axis=1)).sum())
        surprise.append(-ours[np.arange(WINDOW - 1), token_ids[1:]])
    divergences = np.concatenate(divergence)
    return {
        "perplexity": float(np.exp(np.concatenate(surprise).mean())),
        "mean_divergence": float(divergences.mean()),
        "divergence_p99": float(np.quantile(divergences, 0.99)),
        "same_top_token": same / windows.size,
    }


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Logarithms of probabilities, float64, by row."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help='"smollm2" or a GGUF file')
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--llama", metavar="PYTHON", help="a Python that has llama-cpp-python")
    parser.add_argument("--serve", metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        folder = Path(options.serve)
        np.save(folder / "logits.npy", llama_cpp_logits(options.model, np.load(folder / "windows.npy")))
        return
    path = file_of(options.model)
    windows, logits = workbench_logits(path, options.windows)
    if options.llama:
        with tempfile.TemporaryDirectory() as folder:
            np.save(Path(folder) / "windows.npy", windows)
            subprocess.run([options.llama, __file__, "--serve", folder, "--model", path], check=True)
            logits["llama_cpp"] = np.load(Path(folder) / "logits.npy")
    arms: dict[str, Any] = {arm: compare(rows, logits["float32"], windows) for arm, rows in logits.items()}
    print(json.dumps(arms, indent=2))
    save("int8_quality", {"model": Path(path).stem, "tokens": int(windows.size), "arms": arms})


if __name__ == "__main__":
    main()
