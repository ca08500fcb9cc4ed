"""Archives of Python modules as bytecode, so that the page does not compile its modules at every start.

Bytecode belongs to one version of Python, and the page's is Pyodide: it compiles, in node. Without node the page gets
the sources and starts a second later.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path

from workbench.base.cache_folder import cached, keep, kept, make_folder

SECONDS = 600
"""Maximum duration of a compilation; it takes three seconds on a machine with nothing else to do."""

PROGRAM = """
import importlib._bootstrap_external as importing, io, zipfile

def compiled(content, folder):
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as source, zipfile.ZipFile(made, "w") as target:
        for name in source.namelist():
            data = source.read(name)
            if name.endswith(".py"):
                code = compile(data, f"{folder}/{name}", "exec", dont_inherit=True)
                name, data = name + "c", importing._code_to_hash_pyc(code, bytes(8), False)
            target.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED, 9)
    return made.getvalue()

compiled
"""

SCRIPT = """
import fs from "node:fs";
const [pyodide, program, source, target, folder] = process.argv.slice(2);
const { loadPyodide } = await import(`${pyodide}/pyodide.mjs`);
const python = await loadPyodide({ indexURL: `${pyodide}/` });
const compiled = python.runPython(fs.readFileSync(program, "utf8"));
const content = python.toPy(new Uint8Array(fs.readFileSync(source)));
fs.writeFileSync(target, compiled(content, folder).toJs());
"""


def compiled(archive: bytes, folder: str, pyodide: Path) -> bytes:
    """An archive with bytecode in place of its modules.

    Args:
        archive: A zip file, or a wheel.
        folder: The folder that its files will have in the page, for tracebacks.
        pyodide: Folder with the files of ``runtime``.

    Returns:
        The archive with ``.pyc`` in place of ``.py`` files; as it is if there is no node to compile it. Compiled
        archives are kept in the cache folder.

    Raises:
        OSError: node could not compile it, or a file cannot be written.
    """
    node = shutil.which("node")
    if node is None:
        return archive
    key = hashlib.sha256(f"{pyodide.name} {folder} {PROGRAM}".encode() + archive).hexdigest()[:16]
    target = cached("playground") / f"{key}.zip"
    found = kept(target)
    if found is None:
        make_folder(target.parent)
        with tempfile.TemporaryDirectory(prefix=".compile-", dir=target.parent) as name:
            work = Path(name)
            (work / "compile.mjs").write_text(SCRIPT)
            (work / "compile.py").write_text(PROGRAM)
            (work / "source.zip").write_bytes(archive)
            files = [work / "compile.py", work / "source.zip", work / "compiled.zip"]
            done = subprocess.run(
                [node, str(work / "compile.mjs"), str(pyodide), *map(str, files), folder],
                capture_output=True,
                text=True,
                timeout=SECONDS,
                check=False,
            )
            if done.returncode:
                reasons = [line for line in done.stderr.splitlines() if "Error" in line]
                raise OSError(f"node could not compile the page's modules: {' '.join(reasons)[-300:]}")
            found = keep(work / "compiled.zip", target)
    return found.read_bytes()
