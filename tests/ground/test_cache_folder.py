"""The cache folder is this user's: code is run from it."""

import os
import stat
import sys

import pytest

from workbench.base import cache_folder as module
from workbench.base.cache_folder import UnsafeCacheFolder, cache_folder, cached, keep, kept, make_folder

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such modes")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    path = tmp_path / "above" / "cache"
    monkeypatch.setenv("WORKBENCH_CACHE", str(path))
    return path


@pytest.mark.parametrize("mode", [0o770, 0o777, 0o702, 0o720])
def test_a_folder_that_others_can_write_is_refused(folder, mode):
    folder.mkdir(parents=True)
    folder.chmod(mode)
    with pytest.raises(UnsafeCacheFolder, match=f"{folder} belongs to user {os.getuid()} with mode 0{mode:o}; .*"):
        cache_folder()


@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_our_own_is_accepted(folder, mode):
    folder.mkdir(parents=True)
    folder.chmod(mode)
    assert cache_folder() == folder


def test_a_folder_of_another_user_is_refused(folder, monkeypatch):
    folder.mkdir(parents=True, mode=0o700)
    owner = os.getuid()
    monkeypatch.setattr(module.os, "getuid", lambda: owner + 1)
    with pytest.raises(UnsafeCacheFolder, match=f"belongs to user {owner} .* must belong to user {owner + 1}"):
        cache_folder()


def test_folders_are_made_for_this_user_alone(folder):
    before = os.umask(0)
    try:
        make_folder(cache_folder() / "compiled" / "sources")
    finally:
        os.umask(before)
    for made in (folder.parent, folder, folder / "compiled", folder / "compiled" / "sources"):
        assert stat.S_IMODE(made.stat().st_mode) == 0o700


@pytest.mark.parametrize("name", ["preflight", "preflight/entry.json"])
@pytest.mark.parametrize("mode", [0o720, 0o702])
def test_folders_and_files_below_that_others_can_write_are_refused(folder, name, mode):
    make_folder(folder / "preflight")
    (folder / "preflight" / "entry.json").write_text("{}")
    assert cached("preflight", "entry.json").read_text() == "{}"
    (folder / name).chmod(mode)
    with pytest.raises(UnsafeCacheFolder, match=f"{folder / name} belongs to .* mode 0{mode:o}; .*chmod go-w"):
        cached("preflight", "entry.json")


@pytest.fixture
def library(folder, tmp_path):
    """A file that was kept, and the path that it was kept for."""
    made, path = tmp_path / "made.so", cache_folder() / "library.so"
    made.write_bytes(b"machine code")
    make_folder(path.parent)
    before = os.umask(0)
    try:
        return keep(made, path), path
    finally:
        os.umask(before)


def test_a_kept_file_is_found_again_and_is_this_users_alone(library):
    found, path = library
    assert kept(path) == found and found.read_bytes() == b"machine code"
    assert stat.S_IMODE(found.stat().st_mode) == 0o600
    assert kept(path.with_name("another.so")) is None


def test_a_replaced_file_is_not_used(library):
    found, path = library
    found.write_bytes(b"other machine code")
    assert kept(path) is None and not found.exists()


def test_a_kept_file_that_others_can_write_is_refused(library):
    found, path = library
    found.chmod(0o620)
    with pytest.raises(UnsafeCacheFolder):
        kept(path)


def load_blas():
    from workbench.base import blas

    return blas.renamed_copy(blas._find_openblas())


def compile_msl():
    from workbench.kernels.msl import compiler

    text = "kernel void k(global float *y) { y[0] = 1.0f; }"
    return compiler.compile_kernel(text, checks=False)


@pytest.mark.parametrize("make", [load_blas, compile_msl])
def test_machine_code_that_was_replaced_is_made_again(folder, make):
    if make is load_blas and not sys.platform.startswith("linux"):
        pytest.skip("the copy of the BLAS is for Linux only")
    made = make()
    content = made.read_bytes()
    assert make() == made
    made.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    again = make()
    assert again.name.rpartition("-")[0] == made.name.rpartition("-")[0]
    assert again.read_bytes() != content[:-1] + bytes([content[-1] ^ 1])
