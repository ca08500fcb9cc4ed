"""Draw docs/images/policy-*.svg: one workload under vLLM's order, the limits on partial prefills and three policies.

python docs/images/make_policy_pictures.py
"""

from __future__ import annotations

from html import escape
from pathlib import Path

from workbench import Trace, simulate
from workbench.engine.cost_model import CostModel
from workbench.engine.policies import Deadline, DecodeFirst, ShortestRemainingFirst
from workbench.engine.policy import SchedulingPolicy
from workbench.viz.palette import FOCUS_HUES, LIGHT

BUDGET = 128
WORKLOAD = {
    "config": {"max_num_batched_tokens": BUDGET, "num_blocks": 400, "max_num_seqs": 16},
    "cost_model": {"fixed": 0.1},
    "requests": [
        {"id": "stream", "prompt": {"len": 8}, "max_tokens": 24},
        {"id": "long A", "prompt": {"len": 1000}, "max_tokens": 3},
        {"id": "long B", "prompt": {"len": 900}, "max_tokens": 3},
        {"id": "short 1", "prompt": {"len": 20}, "max_tokens": 5, "arrival_step": 2},
        {"id": "short 2", "prompt": {"len": 20}, "max_tokens": 5, "arrival_step": 4},
        {"id": "medium", "prompt": {"len": 150}, "max_tokens": 5, "arrival_step": 5},
        {"id": "short 3", "prompt": {"len": 20}, "max_tokens": 5, "arrival_step": 9},
    ],
}
LIMITS = {"max_num_partial_prefills": 3, "max_long_partial_prefills": 1, "long_prefill_token_threshold": 200}
PICTURES: dict[str, tuple[str, dict[str, int], SchedulingPolicy | None]] = {
    "vllm": ("vLLM V1's order", {}, None),
    "limits": ("max_num_partial_prefills=3, max_long_partial_prefills=1", LIMITS, None),
    "shortest": ("ShortestRemainingFirst(aging=64)", {}, ShortestRemainingFirst(aging=64)),
    "decode-first": ("DecodeFirst(max_prefill_tokens=64)", {}, DecodeFirst(max_prefill_tokens=64)),
    "deadline": ("Deadline(base=0.3, per_prompt_token=0.002)", {}, Deadline(base=0.3, per_prompt_token=0.002)),
}
LEFT, TOP, LANE, STEP, NUM_STEPS = 84, 30, 26, 15, 40


def picture(title: str, trace: Trace) -> str:
    """One lane per request and one column per step; a bar's height is the chunk's share of the token budget."""
    lanes = {rid: TOP + LANE * number for number, rid in enumerate(trace.requests)}
    hues = dict(zip(trace.requests, (LIGHT.muted, *FOCUS_HUES)))
    parts = [_text(LEFT, 18, title, weight="600")]
    for rid, y in lanes.items():
        parts.append(_text(LEFT - 8, y + LANE - 8, rid, anchor="end"))
        parts.append(f'<path d="M{LEFT} {y + LANE - 4}h{NUM_STEPS * STEP}" stroke="{LIGHT.hairline}"/>')
    for index, record in enumerate(trace[:NUM_STEPS]):
        x = LEFT + index * STEP
        for rid in record.arrived:
            parts.append(f'<path d="M{x} {lanes[rid] + 2}v{LANE - 6}" stroke="{LIGHT.text}" stroke-width="2"/>')
        for chunk in record.chunks:
            height = max(3.0, (LANE - 8) * (chunk.num_tokens / BUDGET) ** 0.5)
            fill = "none" if chunk.is_decode else hues[chunk.request_id]
            said = f"step {record.step}: {chunk.num_tokens} tokens, limited by {chunk.limited_by}"
            parts.append(
                f'<rect x="{x + 2}" y="{lanes[chunk.request_id] + LANE - 4 - height:.1f}" width="{STEP - 3}" '
                f'height="{height:.1f}" fill="{fill}" stroke="{hues[chunk.request_id]}"><title>{said}</title></rect>'
            )
    bottom = TOP + LANE * len(lanes)
    for step in range(0, NUM_STEPS + 1, 5):
        parts.append(_text(LEFT + step * STEP, bottom + 12, str(step)))
    parts.append(_text(LEFT - 8, bottom + 12, "step", anchor="end"))
    width, height = LEFT + NUM_STEPS * STEP + 12, bottom + 20
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" font-size="11" '
        f'font-family="system-ui, sans-serif" aria-label="{escape(title)}">'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'
    )


def _text(x: float, y: float, text: str, anchor: str = "start", weight: str = "400") -> str:
    return (
        f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-weight="{weight}" fill="{LIGHT.text}">{escape(text)}</text>'
    )


def main() -> None:
    """Draw all pictures and print what each order does to the times to first token."""
    for name, (title, limits, policy) in PICTURES.items():
        trace = simulate(WORKLOAD, config=limits, policy=policy, cost_model=CostModel(fixed=0.1))
        Path(__file__).with_name(f"policy-{name}.svg").write_text(picture(title, trace), encoding="utf-8")
        print(f"{title:58}", {rid: request.ttft.steps for rid, request in trace.metrics().requests.items()})


if __name__ == "__main__":
    main()
