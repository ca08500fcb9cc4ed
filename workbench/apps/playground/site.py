"""Puts the playground into a folder, from which any web server can serve it, also below another page's address."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import zipfile
from pathlib import Path

import workbench
from workbench.analysis.fleet.routers import RULES
from workbench.apps.playground import presets, runtime
from workbench.apps.playground.bytecode import compiled
from workbench.config import EngineConfig
from workbench.viz.bundle import JS_DIRECTORY, bundle
from workbench.viz.glossary import TERMS

PACKAGE = Path(workbench.__file__).parent
PAGE = Path(__file__).parent / "page"

SHARED = (JS_DIRECTORY / "dom.js",)
"""Modules of the views that the page imports."""

ROOMS = (
    *(".", "base", "trace", "trace/readings", "scheduler", "simulation", "simulation/costs", "analysis"),
    "analysis/fleet",
    *("viz", "viz/layout", "apps", "apps/playground"),
)
"""Folders of the package whose modules run in the page."""

ARCHIVE = "package.zip"
STANDARD_LIBRARY = "python_stdlib.zip"


def package_archive() -> bytes:
    """The modules that the page needs, as a zip file; the same sources give the same bytes."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for path in sorted(path for room in ROOMS for path in (PACKAGE / room).glob("*.py")):
            name = f"workbench/{path.relative_to(PACKAGE).as_posix()}"
            archive.writestr(zipfile.ZipInfo(name), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return content.getvalue()


def build(target: Path, pyodide: Path | None = None) -> dict[str, int]:
    """Write the playground's files.

    Args:
        target: The folder; created if needed, files of an earlier build are replaced.
        pyodide: Folder with the files of `runtime`; by default the one in the cache folder.

    Returns:
        Size of each file in bytes as a web server sends it, compressed with gzip.

    Raises:
        OSError: Pyodide has not been fetched, or a file cannot be written.
    """
    source = pyodide or runtime.runtime_folder()
    if not runtime.is_fetched(source):
        raise OSError(
            "the playground needs Pyodide, which is Python for web pages (6.6 MB): fetch it once with "
            "`workbench playground --fetch`"
        )
    files = {path.name: path.read_bytes() for path in PAGE.iterdir() if path.suffix in (".html", ".js", ".css")}
    files |= {path.name: path.read_bytes() for path in SHARED}
    for name in [name for name in files if name.endswith(".js")]:
        files[name] = files[name].replace(b"../../../viz/js/", b"./")
    files["view.js"] = bundle().encode()
    files[ARCHIVE] = compiled(package_archive(), f"/{ARCHIVE}", source)
    listed = {
        "presets": {name: preset._asdict() for name, preset in presets.PRESETS.items()},
        "policies": presets.POLICIES,
        "routers": RULES,
        "defaults": EngineConfig().to_dict(),
        "glossary": TERMS,
    }
    files["presets.json"] = json.dumps(listed, separators=(",", ":")).encode()
    wheel = f"pyodide/{runtime.MSGSPEC_WHEEL}"
    for name in (*runtime.FILES, runtime.MSGSPEC_WHEEL):
        files[f"pyodide/{name}"] = (source / name).read_bytes()
    files[f"pyodide/{STANDARD_LIBRARY}"] = compiled(files[f"pyodide/{STANDARD_LIBRARY}"], "/lib/python314.zip", source)
    files[wheel] = compiled(files[wheel], "/lib/python3.14/site-packages", source)
    files["parts.json"] = json.dumps({"wheel": wheel, "package": ARCHIVE, "version": _version(files)}).encode()
    for name, content in files.items():
        _write(target / name, content)
    return {name: len(gzip.compress(content, 6)) for name, content in files.items()}


def _version(files: dict[str, bytes]) -> str:
    """A name for these files: another one whenever one of them changes."""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(name.encode() + files[name])
    return digest.hexdigest()[:12]


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
