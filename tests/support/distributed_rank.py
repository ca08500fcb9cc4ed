"""One rank of a job, for the tests: `python distributed_rank.py WHAT JSON`, started by distributed_jobs.Job."""

import ctypes
import json
import signal
import sys
from pathlib import Path

import workbench  # noqa: F401

PROMPTS = {"a": [5, 17, 3, 88, 41, 9, 60], "b": [2, 7], "c": list(range(30, 53)), "late": [11, 12, 13]}
SMOLLM2_CONFIG = {"max_num_batched_tokens": 16, "num_blocks": 16}
SMOLLM2_PROMPTS = {"x": "The capital of France is", "y": "A list of prime numbers: 2, 3, 5, 7, 11, 13, 17"}
WORK = {0: ["c", "a"], 1: ["b"]}
MAX_TOKENS = {"a": 6, "c": 12, "b": 2, "late": 3}
CONFIG = {"max_num_batched_tokens": 16, "block_size": 4, "num_blocks": 64, "max_model_len": 96}


def join(options):
    from workbench.engine.distributed.group import join_group, leader_host
    from workbench.engine.distributed.link import open_link

    group = join_group()
    return group, open_link(group, leader_host(), silence_limit=options.get("silence_limit", 60.0))


def sharded(options):
    """A tiny model over all ranks: rank 0 writes tokens, logits and facts of two engines, then runs without end."""
    from tiny_models import tiny_loaded_model

    from workbench.config import EngineConfig
    from workbench.engine.distributed.job import ShardedEngine
    from workbench.engine.distributed.ranks import follow
    from workbench.models.sharding import shard

    group, link = join(options)
    model = tiny_loaded_model(options["architecture"])
    shard(model.name, model.model, group)
    if group.rank():
        follow(link, lambda: model)
    else:
        results = []
        for num_blocks in (CONFIG["num_blocks"], CONFIG["num_blocks"] // 2):
            with ShardedEngine(model, link, EngineConfig(**{**CONFIG, "num_blocks": num_blocks})) as engine:
                run = tokens_and_logits(engine, {name: PROMPTS[name] for name in "abc"}, max_tokens=6)
                results.append({**run, "facts": engine.runner.describe()})
        Path(options["out"]).write_text(json.dumps(results))
        with ShardedEngine(model, link, EngineConfig(**CONFIG)) as engine:
            run_without_end(engine)


def tokens_and_logits(engine, prompts, max_tokens):
    """Tokens by request and every row of logits, in the order in which they were computed."""
    from workbench import SamplingParams

    for name, prompt in prompts.items():
        engine.add_request(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True), request_id=name)
    rows = []
    while (made := engine.step_into(layers=False)) is not None:
        if isinstance(made, tuple) and made[0] == "forward":
            rows += made[1].tolist()
    return {"tokens": {name: output.token_ids for name, output in engine.outputs.items()}, "logits": rows}


def run_without_end(engine):
    """Decode until the process is killed."""
    from workbench import SamplingParams

    while True:
        engine.add_request(PROMPTS["a"], SamplingParams(max_tokens=32, ignore_eos=True))
        engine.run(progress=False)
        print("running", flush=True)


def sums(options):
    """Sums over the ranks without end, to lose a rank in the middle; rank 1 fails when a file exists."""
    import time

    import mlx.core as mx

    group, link = join(options)
    link.doing = "adding up"
    while True:
        try:
            if group.rank() == 1 and Path(options["fails"]).exists():
                raise MemoryError("planted")
            mx.eval(mx.distributed.all_sum(mx.array([1.0]), group=group))
        except Exception as problem:
            link.fail(f"{type(problem).__name__}: {problem}")
        print("running", flush=True)
        time.sleep(0.02)


def lockstep(options):
    """One engine per rank: each writes its tokens, the rows its model counted in every pass, and its dummy steps."""
    import mlx.core as mx
    from tiny_models import tiny_loaded_model

    from workbench import SamplingParams
    from workbench.config import EngineConfig
    from workbench.engine.distributed.lockstep import LockstepEngine
    from workbench.engine.speculation.custom import CustomProposer

    group, link = join(options)
    rank = group.rank()
    model = tiny_loaded_model(options["architecture"])
    totals = []

    layer = model.model.layers[-1]

    class Counting(type(layer.post_attention_layernorm)):
        """A layer that waits for the other ranks, like experts that are spread over them."""

        def __call__(self, x):
            rows = mx.distributed.all_sum(mx.array([x.shape[0] * x.shape[1]]), group=group)
            totals.append(rows)
            return super().__call__(x + 0 * rows)

    layer.post_attention_layernorm.__class__ = Counting
    with LockstepEngine(model, group, link, EngineConfig(**CONFIG, **options["config"])) as engine:
        del totals[:]  # the preflight's
        if known := options.get("known"):  # the next two tokens, and a wrong one
            found = lambda tokens: next(one for one in known if one[: len(tokens)] == tokens)  # noqa: E731
            draft = lambda tokens, count: [*found(tokens)[len(tokens) :][: count - 1], 1]  # noqa: E731
            engine._step.speculator.proposer = CustomProposer(draft, model.vocab_size)
        passes = []
        watch_passes(engine, rank, passes, arrives="late" if rank else None)
        for name in WORK[rank]:
            engine.add_request(PROMPTS[name], SamplingParams(max_tokens=MAX_TOKENS[name]), request_id=name)
        engine.run(progress=False)
        results = {
            "tokens": {name: output.token_ids for name, output in engine.outputs.items()},
            "passes": passes,
            "totals": [int(total.item()) for total in totals],
            "num_dummy_steps": engine.num_dummy_steps,
            "num_steps": len(engine.trace),
            "num_accepted": sum(chunk.num_accepted for step in engine.trace for chunk in step.chunks),
            "free_blocks": engine.scheduler.num_free_blocks,
        }
    Path(options["out"]).with_suffix(f".{rank}").write_text(json.dumps(results))
    link.close()


def watch_passes(engine, rank, passes, arrives):
    """Note what the ranks agreed on and the rows of this one in every pass; let a request arrive in a dummy step."""
    from workbench import SamplingParams

    forward = engine.runner.forward

    def watched(packed):
        agreement = engine.agreement
        passes.append([agreement.num_tokens, agreement.has_prefill, packed.num_tokens])
        if arrives and agreement.num_tokens[rank] == 0 and arrives not in engine.outputs:
            engine.add_request(PROMPTS[arrives], SamplingParams(max_tokens=MAX_TOKENS[arrives]), request_id=arrives)
        return forward(packed)

    engine.runner.forward = watched


def bundled(options):
    """SmolLM2 as a command loads it, with all weights, of which only the first layers run."""
    from workbench.config import EngineConfig
    from workbench.engine.distributed import job

    load_whole = job.load_model

    def load_model(*arguments, **named):
        loaded = load_whole(*arguments, **named)
        del loaded.model.model.layers[options["num_layers"] :]
        return loaded

    def lead(_, make_engine):
        with make_engine(EngineConfig(**SMOLLM2_CONFIG)) as engine:
            results = tokens_and_logits(engine, SMOLLM2_PROMPTS, max_tokens=4)
        Path(options["out"]).write_text(json.dumps(results))
        return 0

    job.load_model = load_model
    return job.run_job("smollm2", lead)


def end_with_the_test():
    """Let Linux kill this process when the one that started it ends, however it does. Nothing else ends the ranks."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


if __name__ == "__main__":
    end_with_the_test()
    what, options = sys.argv[1:]
    sys.exit({"sharded": sharded, "lockstep": lockstep, "sums": sums, "bundled": bundled}[what](json.loads(options)))
