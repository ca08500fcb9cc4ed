"""Joins the ES modules of ``js/`` into the single module that notebooks, Panel and saved pages load.

These hosts load a view from one string, in which modules cannot import each other by path. So each ordinary module
becomes a function that returns its exports and is called once, after the modules it imports.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

from workbench.trace.readings.run_clock import IDLE_SECONDS
from workbench.viz import palette
from workbench.viz.duel import POLICIES, measure_words
from workbench.viz.glossary import TERMS

JS_DIRECTORY = Path(__file__).parent / "js"
ENTRY = "dashboard.js"
COMMON_SHEETS = ("page.css", "controls.css", "panels.css")
STYLE_SHEETS = {
    ENTRY: (*COMMON_SHEETS, "texts.css", "step_into.css"),
    "kernel_run.js": (*COMMON_SHEETS, "kernel_run.css"),
}
"""The style sheets of each page."""

_IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./(\w+)\.js";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:const|class|function|async function) (\w+))", re.MULTILINE)
_DEFAULT = re.compile(r"^export default .*$", re.MULTILINE)


@cache
def bundle(entry: str = ENTRY) -> str:
    """The source of one ES module that holds ``entry`` and all its imports, and exports ``render``.

    Raises:
        ValueError: Modules import each other in a circle, import a name that is not exported, or use a form of import
            or export that is not supported.
    """
    parts: dict[str, str] = {}
    _collect(entry.removesuffix(".js"), parts, ())
    style = "\n".join((JS_DIRECTORY / name).read_text(encoding="utf-8") for name in STYLE_SHEETS.get(entry, ()))
    joined = "\n".join(parts.values())
    shared = {
        "GLOSSARY": TERMS,
        "IDLE_SECONDS": IDLE_SECONDS,
        "MEASURES": measure_words(),
        "POLICIES": list(POLICIES.items()),
        "PALETTE": palette.as_dict(),
        "STYLE": style,
    }
    for name, value in shared.items():
        joined = joined.replace(f'"__{name}__"', json.dumps(value))
    exported = f"${entry.removesuffix('.js')}"
    return f"{joined}\nexport const render = {exported}.render;\nexport default {{ render }};\n"


def _source(name: str) -> str:
    return (JS_DIRECTORY / f"{name}.js").read_text(encoding="utf-8")


def _collect(name: str, parts: dict[str, str], importing: tuple[str, ...]) -> None:
    if name in parts:
        return
    if name in importing:
        raise ValueError(f"js modules import each other in a circle: {' -> '.join((*importing, name))}")
    source = _source(name)
    for names, imported in _IMPORT.findall(source):
        _collect(imported, parts, (*importing, name))
        missing = set(re.findall(r"\w+", names)) - set(_EXPORT.findall(_source(imported)))
        if missing:
            raise ValueError(f"js/{name}.js imports {sorted(missing)} from js/{imported}.js, which does not export it")
    exports = ", ".join(_EXPORT.findall(source))
    body = _IMPORT.sub(lambda match: f"const {match[1]} = ${match[2]};", source)
    body = _DEFAULT.sub("", _EXPORT.sub("", body))
    if re.search(r"^(?:import|export)\b", body, re.MULTILINE):
        raise ValueError(f"js/{name}.js has an import or export in a form that bundle.py does not support")
    parts[name] = f"const ${name} = (() => {{\n{body}\nreturn {{ {exports} }};\n}})();"
