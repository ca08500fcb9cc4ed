"""Styles of notebook output: colours by role in both themes, each rule scoped to ``.wb-repr``."""

from __future__ import annotations

from dataclasses import asdict

from workbench.viz.palette import DARK, EVENT_MARKS, FOCUS_HUES, LIGHT, Theme, ink_on, mix


def _variables(theme: Theme) -> str:
    roles = "".join(f"--wb-{role}:{colour};" for role, colour in asdict(theme).items())
    light = "".join(f"--wb-d{i}:{mix(hue, theme.background, 0.45)};" for i, hue in enumerate(FOCUS_HUES))
    dark = "dark" if theme is DARK else "light"
    return f"{roles}{light}color-scheme:{dark};"


_HUES = "".join(
    f".wb-repr .prefill.hue{i}{{fill:{hue}}}.wb-repr .decode.hue{i}{{fill:var(--wb-d{i})}}"
    f".wb-repr .dot{i}{{background:{hue}}}.wb-repr svg .on{i}{{fill:{ink_on(hue)}}}"
    for i, hue in enumerate(FOCUS_HUES)
)

STYLE = (
    f".wb-repr{{{_variables(LIGHT)}}}"
    f"@media (prefers-color-scheme:dark){{.wb-repr{{{_variables(DARK)}}}}}"
    f":is([data-jp-theme-light=true],body.vscode-light,[data-md-color-scheme=default]) .wb-repr{{{_variables(LIGHT)}}}"
    f":is([data-jp-theme-light=false],body.vscode-dark,[data-md-color-scheme=slate]) .wb-repr{{{_variables(DARK)}}}"
    ".wb-repr{color:var(--jp-content-font-color1,currentColor);font:13px/1.45 system-ui,sans-serif;max-width:780px}"
    ".wb-repr h4{font-size:14px;font-weight:600;margin:4px 0 2px}"
    ".wb-repr h5{font-size:12px;font-weight:600;margin:12px 0 4px}"
    ".wb-repr p{margin:2px 0;opacity:.8}"
    ".wb-repr .prefill{fill:var(--wb-prefill)}.wb-repr .decode{fill:var(--wb-decode)}"
    ".wb-repr .kv{fill:var(--wb-kv)}.wb-repr .owned{fill:var(--wb-owned)}.wb-repr .cached{fill:var(--wb-cached)}"
    ".wb-repr .free{fill:var(--wb-free);stroke:var(--wb-hairline)}.wb-repr .reserved{fill:var(--wb-hairline)}"
    ".wb-repr .hole{fill:none;stroke:var(--wb-owned);stroke-dasharray:2}"
    ".wb-repr .slack{fill:none;stroke:var(--wb-hairline)}.wb-repr .new{stroke:currentColor;stroke-width:1.2}"
    ".wb-repr .outlined{stroke:currentColor;stroke-width:.75}"
    f".wb-repr .stall{{fill:{EVENT_MARKS['stall'][1]}}}"
    ".wb-repr .cursor{fill:none;stroke:var(--wb-cursor);stroke-width:1.5}"
    ".wb-repr svg text{fill:currentColor;font:11px system-ui,sans-serif}"
    ".wb-repr svg .number{font:11px ui-monospace,Menlo,Consolas,monospace}"
    ".wb-repr svg .muted{opacity:.7}"
    ".wb-repr svg .label{font:11px ui-monospace,Menlo,Consolas,monospace}.wb-repr svg .on{fill:#111418}"
    ".wb-repr table{border-collapse:collapse;font-size:12px;margin:4px 0}"
    ".wb-repr th{font-weight:500;opacity:.7}"
    # Named three times to take precedence over the rules of notebooks, which align tables to the right.
    ".wb-repr.wb-repr.wb-repr :is(td,th){padding:2px 14px 2px 0;vertical-align:top;text-align:left;background:none}"
    ".wb-repr td{font-variant-numeric:tabular-nums;overflow-wrap:break-word;white-space:pre-wrap}"
    ".wb-repr td.long{overflow-wrap:anywhere;min-width:8em}"
    ".wb-repr.wb-repr.wb-repr pre{font:12px/1.45 ui-monospace,Menlo,Consolas,monospace}"
    ".wb-repr td:first-child{overflow-wrap:normal}"
    ".wb-repr i.dot{display:inline-block;width:8px;height:8px;border-radius:2px;margin-right:6px}" + _HUES
)
"""Styles of a fragment; each rule is scoped to ``.wb-repr``. Dark or light follows the notebook."""
