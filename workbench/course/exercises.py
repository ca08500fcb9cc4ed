"""The exercises' checkers. Each compares with something that was not written for it: the engine or the simulation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from itertools import accumulate
from typing import Any

import numpy as np

from workbench.course.verdict import Verdict, try_cases
from workbench.engine.fork import fork
from workbench.engine.policy import PolicyView, SchedulingPolicy
from workbench.engine.request import Request
from workbench.engine.simulate import simulate
from workbench.trace import StepRecord, Trace


def _single(name: str, length: int, max_tokens: int = 1) -> dict[str, Any]:
    return {"id": name, "prompt": {"len": length}, "max_tokens": max_tokens}


def _mixed_steps() -> list[StepRecord]:
    """Steps of one small run: whole prompts, chunks and decodes, block tables that are not in order."""
    requests = [
        _single("a", 5, 6),
        {**_single("b", 50, 3), "arrival_step": 2},
        {**_single("c", 9, 4), "arrival_step": 3},
    ]
    config = {"max_num_batched_tokens": 16, "block_size": 4, "num_blocks": 64}
    return [step for step in simulate({"config": config, "requests": requests}) if step.chunks]


def check_num_steps(answer: int, *, num_prompt_tokens: int, token_budget: int, num_ahead: int) -> Verdict:
    """Notebook 00: ``answer`` is the number of steps in which a prompt is computed.

    Args:
        answer: The reader's number.
        num_prompt_tokens: Length of the prompt.
        token_budget: Tokens of a step.
        num_ahead: Length of a short prompt that came before and decodes meanwhile.
    """
    requests = [_single("short", num_ahead, 1000), _single("long", num_prompt_tokens)]
    config = {"max_num_batched_tokens": token_budget, "enable_prefix_caching": False}
    trace = simulate({"config": config, "requests": requests}, max_steps=num_prompt_tokens + 2)
    chunks = [chunk.num_tokens for step in trace for chunk in step.chunks if chunk.request_id == "long"]
    if answer != len(chunks):
        room = f"the first step has room for {chunks[0]} of its {num_prompt_tokens} tokens, the second for"
        guess = "A whole number of steps is asked for" if answer is None else f"Not {answer!r} steps"
        return Verdict(False, f"{guess}: {room} {token_budget - 1}. How does it go on?")
    return Verdict(True, f"in chunks of {', '.join(map(str, chunks))}.")


def check_mask(answer: Callable[[list[int], list[int]], np.ndarray]) -> Verdict:
    """Notebook 01: ``answer(cu_seqlens_q, seqused_k)`` is the block-diagonal causal mask, bool [T, total_kv]."""
    cases = (({"cu_seqlens_q": s.cu_seqlens_q, "seqused_k": s.seqused_k}, s.mask()) for s in _mixed_steps())
    return try_cases(answer, cases, lambda result, mask: np.array_equal(np.asarray(result, dtype=bool), mask))


def check_slots(answer: Callable[[list[int], int, int], int]) -> Verdict:
    """Notebook 02: ``answer(block_table, position, block_size)`` is the slot of a position."""
    cases = [({"block_table": [7], "position": 0, "block_size": 16}, 112)]
    for step in _mixed_steps():
        for index, chunk in enumerate(step.chunks):
            slots = step.slot_mapping[step.cu_seqlens_q[index] :]
            arguments = {"block_table": step.block_table(index), "block_size": step.block_size}
            cases += [({**arguments, "position": chunk.start + i}, int(slots[i])) for i in range(chunk.num_tokens)]
    return try_cases(answer, cases, lambda result, slot: result == slot)


def check_find_seq_idx(answer: Callable[[list[int], int], int]) -> Verdict:
    """Notebook 03: ``answer(cu_seqlens_q, row)`` is the sequence that owns a row, and reads few entries to find it."""
    cases = []
    for lengths in ([3], [1, 1, 1], [2, 0, 3], [0, 0, 4, 0], [1] * 40 + [100] + [0] * 3 + [5]):
        owners = np.repeat(np.arange(len(lengths)), lengths)
        cu_seqlens = [0, *accumulate(lengths)]
        cases += [({"cu_seqlens_q": cu_seqlens, "row": row}, int(owner)) for row, owner in enumerate(owners)]
    verdict = try_cases(answer, cases, lambda result, owner: result == owner)
    if verdict:
        counted = _CountedReads(range(1025))
        answer(counted, 700)
        if counted.num_reads > 40:
            return Verdict(
                False, f"right, but {counted.num_reads} of 1,025 entries were read: halve the range instead."
            )
    return verdict


class _CountedReads(list):
    """A list that counts how often an entry is read."""

    num_reads = 0

    def __getitem__(self, index: Any) -> Any:
        self.num_reads += len(range(*index.indices(len(self)))) if isinstance(index, slice) else 1
        return super().__getitem__(index)

    def __iter__(self) -> Any:
        self.num_reads += len(self)
        return super().__iter__()


def check_chunks(answer: Callable[[int, int, int], list[tuple[int, int]]]) -> Verdict:
    """Notebook 04: ``answer(num_prompt_tokens, token_budget, num_decodes)`` are the (start, end) of a prompt's chunks.

    ``num_decodes`` older requests decode one token in every step meanwhile.
    """
    cases = []
    for length, budget, num_decodes in ((10, 32, 0), (100, 32, 0), (96, 32, 0), (100, 32, 5), (33, 34, 1), (1, 8, 7)):
        decoding = [_single(f"d{i}", 1, 200) for i in range(num_decodes)]
        long = {**_single("long", length), "arrival_step": 1}
        config = {"max_num_batched_tokens": budget, "enable_prefix_caching": False}
        trace = simulate({"config": config, "requests": [*decoding, long]}, max_steps=200)
        chunks = [(c.start, c.end) for step in trace for c in step.chunks if c.request_id == "long"]
        arguments = {"num_prompt_tokens": length, "token_budget": budget, "num_decodes": num_decodes}
        cases.append((arguments, chunks))
    return try_cases(answer, cases, lambda result, chunks: [tuple(chunk) for chunk in result] == chunks)


def check_recomputed(answer: Callable[[int, int], int]) -> Verdict:
    """Notebook 05: ``answer(num_tokens, chunk)`` are the rows computed when each chunk starts again from position 0."""
    cases = []
    for length, chunk in ((100, 100), (100, 50), (1024, 256), (1000, 32), (7, 3), (5, 8)):
        ends = [*range(chunk, length, chunk), length]
        cases.append(({"num_tokens": length, "chunk": chunk}, sum(ends)))
    return try_cases(answer, cases, lambda result, rows: result == rows)


def check_victim(answer: Callable[[list[tuple[str, int]], str], str]) -> Verdict:
    """Notebook 07: ``answer(running, policy)`` is who is preempted: running is (id, priority) as admitted."""
    cases = []
    for policy in ("fcfs", "priority"):
        for priorities in ((0, 0, 0), (2, 0, 1), (0, 2, 2), (1, 2, 0)):
            requests = [
                {**_single(name, 24, 40), "priority": priority, "arrival_step": step}
                for step, (name, priority) in enumerate(zip("abc", priorities))
            ]
            config = {"block_size": 8, "num_blocks": 13, "policy": policy, "enable_prefix_caching": False}
            trace = simulate({"config": config, "requests": requests})
            step = next(step for step in trace if step.preempted)
            before = trace[step.step - 1].running
            running = [(name, trace.requests[name].priority) for name in before]
            cases.append(({"running": running, "policy": policy}, step.preempted[0]))
    return try_cases(answer, cases, lambda result, victim: result == victim)


def check_cached_tokens(answer: Callable[[int, int, int], int]) -> Verdict:
    """Notebook 08: ``answer(num_shared, num_prompt_tokens, block_size)`` are the tokens taken from the prefix cache.

    The prompt's first ``num_shared`` tokens were computed by an earlier request.
    """
    cases = []
    for shared, length, block_size in ((40, 60, 16), (48, 60, 16), (48, 48, 16), (15, 60, 16), (64, 64, 8), (9, 9, 4)):
        common = {"len": shared, "seed": "common"}
        rest = [{"len": length - shared, "seed": "own"}] if length > shared else []
        later = {"id": "later", "prompt": {"parts": [common, *rest]}, "arrival_step": 3, "max_tokens": 1}
        # Three tokens of its own, so that every full block of the common part is full in the first request too.
        first = {"id": "first", "prompt": {"parts": [common, {"len": 3, "seed": "tail"}]}, "max_tokens": 1}
        trace = simulate({"config": {"block_size": block_size}, "requests": [first, later]})
        chunk = next(step.chunk("later") for step in trace if "later" in step.num_kv_computed)
        arguments = {"num_shared": shared, "num_prompt_tokens": length, "block_size": block_size}
        cases.append((arguments, chunk.num_cached_tokens))
    return try_cases(answer, cases, lambda result, tokens: result == tokens)


def check_knobs(workload: Mapping[str, Any], knobs: Mapping[str, Any], *, short_ttft: int, long_ttft: int) -> Verdict:
    """Notebook 06: whether a configuration keeps every request within its bound, in steps to the first token.

    Args:
        workload: Requests whose ids begin with "short" or "long".
        knobs: EngineConfig fields to set.
        short_ttft: Bound of every short request.
        long_ttft: Bound of every long request.
    """
    try:
        trace: Trace = simulate(workload, config=knobs)
    except (TypeError, ValueError) as problem:
        return Verdict(False, str(problem))
    for name, request in trace.metrics().requests.items():
        bound = short_ttft if name.startswith("short") else long_ttft
        if request.ttft is None or request.ttft.steps > bound:
            took = "has none" if request.ttft is None else f"has it after {request.ttft.steps} steps"
            return Verdict(False, f"{name} should have its first token within {bound} steps and {took}.")
    return Verdict(True, f"{len(trace.requests)} requests are within their bounds.")


def check_token_of(answer: Callable[[np.ndarray, float], int]) -> Verdict:
    """Notebook 09: ``answer(probabilities, number)`` is the token in whose part of [0, 1) the number lies."""
    rng = np.random.default_rng(0)
    cases = []
    for _ in range(200):
        weights = rng.integers(1, 20, rng.integers(3, 7))
        weights[rng.integers(len(weights))] = 0  # a token that is never to be taken
        probabilities = weights / weights.sum()
        token = int(rng.choice(np.flatnonzero(probabilities > 0)))
        # A number from the inside of the token's part, so that no rounding decides.
        number = float(probabilities[:token].sum() + rng.uniform(0.1, 0.9) * probabilities[token])
        cases.append(({"probabilities": probabilities.round(6), "number": round(number, 6)}, token))
    return try_cases(answer, cases, lambda result, token: result == token)


def check_standstill(make_condition: Callable[[], Callable[[StepRecord], bool]]) -> Verdict:
    """Notebook 10: the condition holds when a running request that has sampled before gets nothing in a step.

    Args:
        make_condition: Makes a condition with an empty memory; it is handed every record of a run in order.
    """
    from workbench.course.bugs import planted  # which imports MLX

    for bug in ("", "D"):
        for budget in (16, 32, 48):
            requests = [_single("chat", 5, 30), {**_single("long", 150, 3), "arrival_step": 4}]
            config = {"max_num_batched_tokens": budget, "num_blocks": 64}
            with planted(bug) if bug else nullcontext():
                trace = simulate({"config": config, "requests": requests})
            expected = [r.step for r in trace if "chat" in r.running and "chat" not in r.num_kv_computed]
            server = f"a {'sick' if bug else 'healthy'} server with a budget of {budget}"
            try:
                condition = make_condition()
                held = [record.step for record in trace if condition(record)]
            except Exception as problem:
                return Verdict(False, f"on {server} it raises {type(problem).__name__}: {problem}")
            if held != expected:
                return Verdict(False, f"on {server} it holds in steps {held}, and chat stands still in {expected}.")
    return Verdict(True, "it holds in every step in which somebody stands still, and in no other.")


def check_fewest_computed(policy: SchedulingPolicy) -> Verdict:
    """Notebook 11: ``policy.victim`` gives up the request with the fewest computed tokens."""
    asked: list[tuple[Request, list[tuple[str, int]]]] = []

    class Overheard(SchedulingPolicy):
        def victim(self, view: PolicyView) -> Request:
            answer = policy.victim(view)
            asked.append((answer, [(request.request_id, request.num_kv_computed) for request in view.victims]))
            return answer

    # The last one to arrive has the longest prompt, so that it is not the victim by itself.
    requests = [{**_single(name, 10 + 9 * i, 40), "arrival_step": i} for i, name in enumerate("abc")]
    config = {"block_size": 4, "num_blocks": 22, "enable_prefix_caching": False}
    simulate({"config": config, "requests": requests}, policy=Overheard())
    for answer, victims in asked:
        fewest = min(computed for _, computed in victims)
        chosen = dict(victims).get(getattr(answer, "request_id", ""))
        if chosen != fewest:
            shown = ", ".join(f"{name} has {computed}" for name, computed in victims)
            return Verdict(False, f"of {{{shown}}} it gives up {getattr(answer, 'request_id', answer)!r}.")
    return Verdict(True, f"{len(asked)} victims had the fewest computed tokens.")


def check_smallest_budget(answer: int, recording: Trace) -> Verdict:
    """Notebook 12: a ``max_num_batched_tokens`` whose last first token is no later than recorded; one less is late."""

    def last_first_token(budget: int) -> int:
        trace = fork(recording, max_num_batched_tokens=budget) if budget else recording
        return max(step.step for step in trace for chunk in step.chunks if chunk.arm in ("new_final", "cached_final"))

    if not isinstance(answer, int) or answer < 1:
        return Verdict(False, f"{answer!r} is no number of tokens.")
    allowed, reached = last_first_token(0), last_first_token(answer)
    if reached > allowed:
        return Verdict(False, f"with {answer} the last first token comes in step {reached}, recorded was {allowed}.")
    smaller = last_first_token(answer - 1) if answer > 1 else allowed + 1
    if smaller <= allowed:
        return Verdict(False, f"with {answer} it comes in step {reached}, in time; so it does with {answer - 1}.")
    return Verdict(True, f"with {answer - 1} it would come in step {smaller}.")
