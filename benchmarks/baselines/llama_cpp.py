"""llama.cpp with continuous batching like its server: decodes first, then prompt tokens up to the batch size.

It runs in a separate Python that has llama-cpp-python. The file is the same, but the weights stay 4 bits wide.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import llama_cpp
import numpy as np
from serving.replay import Events


@dataclass
class Slot:
    """A request in a sequence of the KV cache: its pending tokens and its progress."""

    index: int
    pending: list[int]
    tokens_left: int
    position: int = 0


class LlamaCppEngine:
    """One context, one sequence per open request, one KV buffer for all.

    Args:
        path: The GGUF file.
        concurrency: Maximum number of open requests.
        context: Total number of KV cells.
        batch: Maximum number of tokens in a step.
        threads: Number of threads; one, as in every arm.
    """

    def __init__(self, path: str, concurrency: int, context: int, batch: int, threads: int = 1) -> None:
        llama_cpp.llama_backend_init()
        self._quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = context, batch, batch, concurrency
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = True
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch, self._batch_size = llama_cpp.llama_batch_init(batch, 0, 1), batch
        self._slots: dict[int, Slot] = {}
        self._free = list(range(concurrency))

    def add(self, index: int, prompt: list[int], max_tokens: int) -> None:
        """Put a request into a free sequence."""
        self._slots[self._free.pop()] = Slot(index, list(prompt), max_tokens)

    def step(self) -> Events:
        """One ``llama_decode``."""
        events, num_rows, wanted = Events(), 0, []
        # A decode has one pending token; prompts fill the rest of the batch.
        for number, slot in sorted(self._slots.items(), key=lambda item: (len(item[1].pending) > 1, item[1].index)):
            take = min(len(slot.pending), self._batch_size - num_rows)
            if take and not slot.position:
                events.scheduled.append(slot.index)
            for offset in range(take):
                row, last = num_rows + offset, offset + 1 == len(slot.pending)
                self._batch.token[row], self._batch.pos[row] = slot.pending[offset], slot.position + offset
                self._batch.n_seq_id[row], self._batch.seq_id[row][0], self._batch.logits[row] = 1, number, last
                if last:
                    wanted.append((row, number))
            num_rows += take
            slot.position += take
            slot.pending = slot.pending[take:]
        self._batch.n_tokens = num_rows
        status = llama_cpp.llama_decode(self._context, self._batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        for row, number in wanted:
            logits = llama_cpp.llama_get_logits_ith(self._context, row)
            token = int(np.ctypeslib.as_array(logits, shape=(self._vocab_size,)).argmax())
            slot = self._slots[number]
            events.tokens.append((slot.index, token))
            slot.tokens_left -= 1
            slot.pending = [token]
            if not slot.tokens_left:
                llama_cpp.llama_memory_seq_rm(self._memory, number, -1, -1)
                del self._slots[number]
                self._free.append(number)
        return events
