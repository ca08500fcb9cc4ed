"""The playground on the pages of concepts: a workload that shows the concept, live."""

from __future__ import annotations

from workbench.playground import runtime
from workbench.playground.presets import PRESETS

LIVE = {
    "concepts/step.md": "documents",
    "concepts/packed-batch.md": "bursts",
    "concepts/paged-kv.md": "agents",
    "concepts/chunked-prefill.md": "chunked",
    "concepts/preemption.md": "preemption",
    "concepts/prefix-caching.md": "prefix-caching",
}
"""The workload of the playground that a page shows live."""

FRAME = """

<details class="playground" open><summary>Try it live: {title}</summary>
<p>{hint} <a href="{address}" target="_blank">Open it in the playground</a></p>
<iframe src="{address}" title="The playground: {title}" loading="lazy" allow="clipboard-write"></iframe>
</details>

"""


def with_playground(markdown: str, name: str) -> str:
    """A page with its live example below the title, if it has one and the playground's Python has been fetched.

    Args:
        markdown: The page.
        name: Its path below ``docs``.
    """
    if name not in LIVE or not runtime.is_fetched():
        return markdown
    title, hint, _ = PRESETS[LIVE[name]]
    address = f"{'../' * (name.count('/') + 1)}playground/app/#preset={LIVE[name]}"
    heading, _, rest = markdown.partition("\n")
    return heading + FRAME.format(title=title, hint=hint, address=address) + rest
