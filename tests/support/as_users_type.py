"""The types that a user's checker finds, checked by ``make lint`` with the package; nothing runs this file."""

from typing import assert_type

from workbench import Engine, Trace, simulate
from workbench.methods import TraceMetrics

trace = simulate({"requests": []}, progress=False)
assert_type(trace.whatif(max_num_seqs=3).fork(1)[1:], Trace)
assert_type(Trace.load("run.jsonl").metrics(), TraceMetrics)
trace.metrics().figure()
with Engine("smollm2") as engine:
    engine.fork(3, max_num_seqs=3).explain(engine.trace.arrivals()[0][1].request_id)
    trace.metricx()  # type: ignore[attr-defined]  # an ignore that nothing needs is an error
