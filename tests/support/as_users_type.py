"""The types that a user's checker finds, checked by ``make lint`` with the package; nothing runs this file."""

from typing import assert_type

from workbench import Engine, EngineConfig, SamplingParams, Trace, simulate, simulate_fleet
from workbench.methods import TraceMetrics
from workbench.viz.widget import TraceView

trace = simulate({"requests": []}, progress=False)
assert_type(trace.whatif(max_num_seqs=3).fork(1)[1:], Trace)
assert_type(Trace.load("run.jsonl").metrics(), TraceMetrics)
trace.metrics().figure()
with Engine("smollm2") as engine:
    engine.fork(3, max_num_seqs=3).explain(engine.trace.arrivals()[0][1].request_id)
    trace.metricx()  # type: ignore[attr-defined]  # an ignore that nothing needs is an error
    assert_type(engine.watch(theme="dark", panels=("kv_pool",)), TraceView)
    engine.view("kv_pool", theme="dim")  # type: ignore[arg-type]
    engine.generate(["Hello"], temperatur=1)  # type: ignore[call-arg]
    engine.fork(max_num_batched_tokns=3)  # type: ignore[call-arg]
trace.whatif(attention_backend="metl")  # type: ignore[arg-type]
trace.fork(max_num_seqs="3")  # type: ignore[arg-type]
trace.slowest(by="itl")  # type: ignore[arg-type]
simulate({"requests": []}, blok_size=8)  # type: ignore[call-arg]
simulate_fleet({"requests": []}, router="robin")  # type: ignore[arg-type]
EngineConfig(kv_cache_dtype="fp8")  # type: ignore[arg-type]
SamplingParams().replace(max_token=3)  # type: ignore[call-arg]
