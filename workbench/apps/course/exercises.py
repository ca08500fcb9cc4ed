"""The checkers of the exercises. They compare answers with the engine or the simulation, not with stored solutions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import accumulate
from typing import Any

from msgspec.structs import replace

from workbench.analysis.fork import fork
from workbench.analysis.predict import whatif
from workbench.apps.course.verdict import Verdict, try_cases
from workbench.base.on_demand import np
from workbench.scheduler.policy import PolicyView, SchedulingPolicy
from workbench.scheduler.request import Request
from workbench.simulation.simulate import simulate
from workbench.trace import StepRecord, Trace
from workbench.trace.readings.metrics_collector import metrics


def _single(name: str, length: int, max_tokens: int = 1) -> dict[str, Any]:
    return {"id": name, "prompt": {"len": length}, "max_tokens": max_tokens}


def _mixed_steps() -> list[StepRecord]:
    """Steps of a small run with whole prompts, chunks, decodes, and block tables whose ids are not in order."""
    requests = [
        _single("a", 5, 6),
        {**_single("b", 50, 3), "arrival_step": 2},
        {**_single("c", 9, 4), "arrival_step": 3},
    ]
    config = {"max_num_batched_tokens": 16, "block_size": 4, "num_blocks": 64}
    return [step for step in simulate({"config": config, "requests": requests}) if step.chunks]


def check_num_steps(answer: int, *, num_prompt_tokens: int, token_budget: int, num_ahead: int) -> Verdict:
    """Notebook 00: ``answer`` is the number of steps that compute a prompt.

    Args:
        answer: The reader's number.
        num_prompt_tokens: Length of the prompt.
        token_budget: Maximum number of tokens in a step.
        num_ahead: Length of a short prompt that arrived earlier and decodes during these steps.
    """
    requests = [_single("short", num_ahead, 1000), _single("long", num_prompt_tokens)]
    config = {"max_num_batched_tokens": token_budget, "enable_prefix_caching": False}
    trace = simulate({"config": config, "requests": requests}, max_steps=num_prompt_tokens + 2)
    chunks = [chunk.num_tokens for step in trace for chunk in step.chunks if chunk.request_id == "long"]
    if answer != len(chunks):
        room = f"the first step has room for {chunks[0]} of its {num_prompt_tokens} tokens, the second for"
        guess = "The answer is a whole number of steps" if answer is None else f"Not {answer!r} steps"
        return Verdict(False, f"{guess}: {room} {token_budget - 1}. How does this continue?")
    return Verdict(True, f"chunks of {', '.join(map(str, chunks))}.")


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
    """Notebook 03: ``answer(cu_seqlens_q, row)`` is the sequence of a row, found with few reads of ``cu_seqlens_q``."""
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
            return Verdict(False, f"right, but it reads {counted.num_reads} of 1,025 entries: halve the range instead.")
    return verdict


class _CountedReads(list):
    """A list that counts the reads of its entries."""

    num_reads = 0

    def __getitem__(self, index: Any) -> Any:
        self.num_reads += len(range(*index.indices(len(self)))) if isinstance(index, slice) else 1
        return super().__getitem__(index)

    def __iter__(self) -> Any:
        self.num_reads += len(self)
        return super().__iter__()


def check_chunks(answer: Callable[[int, int, int], list[tuple[int, int]]]) -> Verdict:
    """Notebook 04: ``answer(num_prompt_tokens, token_budget, num_decodes)`` is the (start, end) of each chunk.

    In each of these steps ``num_decodes`` older requests decode a token each.
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
    """Notebook 05: ``answer(num_tokens, chunk)`` is the number of rows if each chunk starts again at position 0."""
    cases = []
    for length, chunk in ((100, 100), (100, 50), (1024, 256), (1000, 32), (7, 3), (5, 8)):
        ends = [*range(chunk, length, chunk), length]
        cases.append(({"num_tokens": length, "chunk": chunk}, sum(ends)))
    return try_cases(answer, cases, lambda result, rows: result == rows)


def check_victim(answer: Callable[[list[tuple[str, int]], str], str]) -> Verdict:
    """Notebook 07: ``answer(running, policy)`` is the preempted id; running is (id, priority) in order of admission."""
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
    """Notebook 08: ``answer(num_shared, num_prompt_tokens, block_size)`` is the number of prefix-cache hit tokens.

    An earlier request has computed the first ``num_shared`` tokens of the prompt.
    """
    cases = []
    for shared, length, block_size in ((40, 60, 16), (48, 60, 16), (48, 48, 16), (15, 60, 16), (64, 64, 8), (9, 9, 4)):
        common = {"len": shared, "seed": "common"}
        rest = [{"len": length - shared, "seed": "own"}] if length > shared else []
        later = {"id": "later", "prompt": {"parts": [common, *rest]}, "arrival_step": 3, "max_tokens": 1}
        # Three more tokens, so that every full block of the common part is full in the first request too.
        first = {"id": "first", "prompt": {"parts": [common, {"len": 3, "seed": "tail"}]}, "max_tokens": 1}
        trace = simulate({"config": {"block_size": block_size}, "requests": [first, later]})
        chunk = next(step.chunk("later") for step in trace if "later" in step.num_kv_computed)
        arguments = {"num_shared": shared, "num_prompt_tokens": length, "block_size": block_size}
        cases.append((arguments, chunk.num_cached_tokens))
    return try_cases(answer, cases, lambda result, tokens: result == tokens)


def check_knobs(workload: Mapping[str, Any], knobs: Mapping[str, Any], *, short_ttft: int, long_ttft: int) -> Verdict:
    """Notebook 06: whether each request gets its first token within its number of steps.

    Args:
        workload: Requests whose ids begin with "short" or "long".
        knobs: EngineConfig fields to set.
        short_ttft: Maximum number of steps to the first token of a short request.
        long_ttft: Maximum number of steps to the first token of a long request.
    """
    try:
        trace: Trace = simulate(workload, config=knobs)
    except (TypeError, ValueError) as problem:
        return Verdict(False, str(problem))
    for name, request in metrics(trace).requests.items():
        bound = short_ttft if name.startswith("short") else long_ttft
        if request.ttft is None or request.ttft.steps > bound:
            took = "never does" if request.ttft is None else f"needs {request.ttft.steps}"
            return Verdict(False, f"{name} should get its first token within {bound} steps, but {took}.")
    return Verdict(True, f"{len(trace.requests)} requests are within their bounds.")


def check_token_of(answer: Callable[[np.ndarray, float], int]) -> Verdict:
    """Notebook 09: ``answer(probabilities, number)`` is the token whose part of [0, 1) contains the number."""
    rng = np.random.default_rng(0)
    cases = []
    for _ in range(200):
        weights = rng.integers(1, 20, rng.integers(3, 7))
        weights[rng.integers(len(weights))] = 0  # a token that must never be chosen
        probabilities = weights / weights.sum()
        token = int(rng.choice(np.flatnonzero(probabilities > 0)))
        # The number is well inside the token's part, so that rounding cannot matter.
        number = float(probabilities[:token].sum() + rng.uniform(0.1, 0.9) * probabilities[token])
        cases.append(({"probabilities": probabilities.round(6), "number": round(number, 6)}, token))
    return try_cases(answer, cases, lambda result, token: result == token)


def check_standstill(make_condition: Callable[[], Callable[[StepRecord], bool]]) -> Verdict:
    """Notebook 10: the condition holds if a step leaves out a running request that has sampled before.

    Args:
        make_condition: Makes a condition without memory of earlier runs; it is called with each record of a run, in
            order.
    """
    from workbench.apps.course.bugs import planted  # imports MLX

    for bug in ("", "D"):
        for budget in (16, 32, 48):
            requests = [_single("chat", 5, 30), {**_single("long", 150, 3), "arrival_step": 4}]
            config = {"max_num_batched_tokens": budget, "num_blocks": 64}
            with planted(bug) if bug else nullcontext():
                trace = list(simulate({"config": config, "requests": requests}))
            # The long prompt loses a chunk, which is not a standstill: it has not sampled yet.
            trace[5] = replace(trace[5], chunks=tuple(c for c in trace[5].chunks if c.request_id != "long"))
            expected = [r.step for r in trace if "chat" in r.running and "chat" not in r.num_kv_computed]
            server = f"a {'sick' if bug else 'healthy'} server with a budget of {budget}"
            try:
                condition = make_condition()
                held = [record.step for record in trace if condition(record)]
            except Exception as problem:
                return Verdict(False, f"on {server} it raises {type(problem).__name__}: {problem}")
            if held != expected:
                return Verdict(False, f"on {server} it holds in steps {held}, and chat stands still in {expected}.")
    return Verdict(True, "it holds in every step in which a request stands still, and in no other.")


def check_fewest_computed(policy: SchedulingPolicy) -> Verdict:
    """Notebook 11: ``policy.victim`` chooses the request with the fewest computed tokens."""
    asked: list[tuple[Request, list[tuple[str, int]]]] = []

    class Observed(SchedulingPolicy):
        def victim(self, view: PolicyView) -> Request:
            answer = policy.victim(view)
            asked.append((answer, [(request.request_id, request.num_kv_computed) for request in view.victims]))
            return answer

    # The request with the fewest computed tokens is the first of the victims once, and the last one once.
    config = {"block_size": 4, "num_blocks": 22, "enable_prefix_caching": False}
    for lengths in ((10, 19, 28), (28, 19, 10)):
        requests = [{**_single(name, n, 40), "arrival_step": i} for i, (name, n) in enumerate(zip("abc", lengths))]
        simulate({"config": config, "requests": requests}, policy=Observed())
    for answer, victims in asked:
        fewest = min(computed for _, computed in victims)
        chosen = dict(victims).get(getattr(answer, "request_id", ""))
        if chosen != fewest:
            shown = ", ".join(f"{name} has {computed}" for name, computed in victims)
            return Verdict(False, f"of {{{shown}}} it chooses {getattr(answer, 'request_id', answer)!r}.")
    return Verdict(True, f"all {len(asked)} victims had the fewest computed tokens.")


def check_smallest_budget(answer: int, recording: Trace) -> Verdict:
    """Notebook 12: the smallest ``max_num_batched_tokens`` whose last first token comes no later than recorded."""

    def last_first_token(budget: int) -> int:
        trace = fork(recording, max_num_batched_tokens=budget) if budget else recording
        return max(request.ttft.steps for request in metrics(trace).requests.values() if request.ttft is not None)

    if not isinstance(answer, int) or answer < 1:
        return Verdict(False, f"{answer!r} is not a number of tokens.")
    allowed, reached = last_first_token(0), last_first_token(answer)
    if reached > allowed:
        return Verdict(False, f"with {answer} the last first token takes {reached} steps, in the recording {allowed}.")
    smaller = last_first_token(answer - 1) if answer > 1 else allowed + 1
    if smaller <= allowed:
        return Verdict(False, f"with {answer} it takes {reached} steps, in time, but with {answer - 1} it does too.")
    return Verdict(True, f"with {answer - 1} it would take {smaller} steps.")


def check_fewest_seats(answer: int, recording: Trace, *, ttft_p99: float) -> Verdict:
    """Notebook 16: the smallest ``max_num_seqs`` with a predicted P99 of the time to first token below ``ttft_p99``."""
    if not isinstance(answer, int) or answer < 1:
        return Verdict(False, f"{answer!r} is not a number of seats.")

    def predicted(seats: int) -> float:
        seconds = metrics(whatif(recording, max_num_seqs=seats)).summary.ttft.p99
        assert seconds is not None  # the recording has finished requests
        return seconds

    reached = predicted(answer)
    if reached >= ttft_p99:
        return Verdict(False, f"with {answer} it is {reached:.2f} s, not below {ttft_p99:g} s: try more.")
    with_fewer = predicted(answer - 1) if answer > 1 else ttft_p99
    if with_fewer < ttft_p99:
        return Verdict(
            False, f"with {answer} it is {reached:.2f} s, and with {answer - 1} still {with_fewer:.2f} s: try fewer."
        )
    return Verdict(True, f"with {answer} it is {reached:.2f} s, with {answer - 1} it would be {with_fewer:.2f} s.")


def check_tokens_kept(answer: Callable[[tuple[int, ...], tuple[int, ...]], Sequence[int]]) -> Verdict:
    """Notebook 13: ``answer(drafts, model_tokens)`` is the list of tokens that a step with drafts appends."""
    # Here, because the engine needs MLX, and notebooks without a model also run in a web page.
    from workbench.engine.sampler import SampledToken
    from workbench.engine.speculation.proposer import Drafts
    from workbench.engine.speculation.verification import accepted

    cases = [
        ({"drafts": drafts, "model_tokens": tokens}, [token.token_id for token in accepted(sampled, Drafts(drafts))])
        for drafts, tokens in (
            ((), (4,)),
            ((7,), (8, 3)),
            ((7,), (7, 3)),
            ((5, 6, 7), (5, 6, 9, 1)),
            ((5, 6, 7), (9, 6, 7, 1)),
            ((5, 6, 7), (5, 6, 7, 1)),
            ((2, 2), (2, 3, 2)),
        )
        for sampled in [[SampledToken(token) for token in tokens]]
    ]
    return try_cases(answer, cases, lambda result, kept: list(result) == kept)


def check_num_chunks(answer: Callable[[int, bool], int]) -> Verdict:
    """Notebook 14: ``answer(num_tokens, ends_by_stop_token)`` is the number of chunks of a request."""

    def num_chunks(num_tokens: int, ends_by_stop_token: bool) -> int:
        ends = {"max_tokens": 40, "stop_at": num_tokens} if ends_by_stop_token else {"max_tokens": num_tokens}
        requests = [{**_single("r", 5), **ends}]
        return sum(len(step.chunks) for step in simulate({"config": {"async_scheduling": True}, "requests": requests}))

    cases = [
        ({"num_tokens": count, "ends_by_stop_token": stop}, num_chunks(count, stop))
        for count in (1, 2, 7)
        for stop in (False, True)
    ]
    return try_cases(answer, cases, lambda result, expected: result == expected)


def check_first_block(answer: Callable[[int, int, int], int]) -> Verdict:
    """Notebook 15: ``answer(num_computed, window, block_size)`` is the first place of the table that a window needs."""
    cases = []
    for window, block_size, chunk in ((1, 4, 5), (7, 4, 3), (8, 4, 8), (9, 4, 6), (128, 16, 50)):
        groups = [{"kind": "sliding_window", "sliding_window": window}]
        config = {"block_size": block_size, "kv_cache_groups": groups, "max_num_batched_tokens": chunk}
        trace = simulate({"config": config, "requests": [_single("r", 3 * window + 20)]})
        for step in trace:
            start, table = step.chunk("r").start, step.block_tables["r"]
            arguments = {"num_computed": start, "window": window, "block_size": block_size}
            cases.append((arguments, next(place for place, block in enumerate(table) if block)))
    return try_cases(answer, cases, lambda result, place: result == place)


def check_could_differ(answer: Callable[[np.ndarray, float], bool]) -> Verdict:
    """Notebook 19: ``answer(logits, error)`` says whether changes by ``error`` can make another token likeliest."""
    cases, rng = [], np.random.default_rng(19)
    for gap, error in ((0.3, 0.1), (0.15, 0.1), (0.05, 0.1), (1.0, 0.4), (1.0, 0.6), (3.0, 0.01)):
        logits = rng.uniform(-9.0, -4.0, 6).round(1)
        best, second = rng.permutation(6)[:2]
        logits[[best, second]] = gap - 3, -3
        moved = np.where(np.arange(6) == best, logits - error, logits + error)
        cases.append(({"logits": logits, "error": error}, bool(moved.argmax() != best)))
    return try_cases(answer, cases, lambda result, expected: bool(result) == expected)


def check_prompt_share(answer: Callable[[list[tuple[str, int]], int], float]) -> Verdict:
    """Notebook 20: ``answer(chunks, token_budget)`` is the share of the budget that prompts take.

    The chunks are pairs of role and number of tokens.
    """
    cases = []
    for step in _mixed_steps():
        assert step.token_budget is not None
        chunks = [(chunk.arm, chunk.num_tokens) for chunk in step.chunks]
        share = step.num_prefill_tokens / step.token_budget
        cases.append(({"chunks": chunks, "token_budget": step.token_budget}, share))
    return try_cases(answer, cases, lambda result, share: abs(result - share) < 1e-9)
