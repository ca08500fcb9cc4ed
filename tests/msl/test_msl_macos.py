"""msl for 64-bit Macs, as far as another machine can build it: Mach-O objects, and a library without open symbols."""

import struct
import subprocess

import mlx.core as mx
import pytest

from workbench import msl
from workbench.kernels.msl import compiler
from workbench.kernels.msl.rewrite import translation_unit
from workbench.kernels.msl.signature import write_kernel

pytest.importorskip("ziglang", reason="compiling for another system needs ziglang (extra: msl)")

TARGET = ("-target", "aarch64-macos")
MACH_O_ARM64 = struct.pack("<II", 0xFEEDFACF, 0x0100000C)
DYNAMIC_LIBRARY = 6
SOURCE = """
const uint i = thread_position_in_grid.x;
threadgroup float shared[64];
shared[i] = x[i];
threadgroup_barrier(mem_flags::mem_threadgroup);
y[i] = simd_sum(shared[63 - i]) * 2.0;
"""


def build(*command):
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def zig():
    found = compiler._zig()
    assert found is not None
    return found


@pytest.fixture(scope="module")
def runtime(zig, tmp_path_factory):
    """The runtime's objects."""
    folder = tmp_path_factory.mktemp("runtime")
    objects = []
    for path in sorted(compiler.RUNTIME_FOLDER.glob("*.cpp")):
        objects.append(folder / f"{path.stem}.o")
        build(*zig.runtime_command, *compiler._RUNTIME_FLAGS, *TARGET, "-c", path, "-o", objects[-1])
    return objects


@pytest.mark.parametrize("checks", [False, True], ids=["unchecked", "checked"])
def test_a_kernel_becomes_a_library_of_a_mac(zig, runtime, tmp_path, checks):
    x = mx.arange(64).astype(mx.float32)
    kernel = write_kernel("scale", ["x"], ["y"], SOURCE, "", [x], [mx.float32], [], False)
    unit, kernel_object, library = (tmp_path / name for name in ("kernel.cl", "kernel.o", "kernel.so"))
    unit.write_text(translation_unit(kernel, "scale"))
    flags = (*compiler._LANGUAGE_FLAGS, *compiler.MAC_FLAGS, *compiler._WARNING_FLAGS, *compiler._CODE_FLAGS)
    flags += (*compiler._UNROLL_FLAGS, *(compiler._CHECK_FLAGS if checks else ()))
    build(*zig.kernel_command, *flags, "-c", unit, "-o", kernel_object)
    libraries = compiler.zig_libraries("darwin")
    build(*zig.link_command, *TARGET, "-shared", "-g", "-o", library, kernel_object, *runtime, *libraries)
    image = library.read_bytes()
    assert image.startswith(MACH_O_ARM64) and struct.unpack_from("<I", image, 12)[0] == DYNAMIC_LIBRARY
    assert b"/usr/lib/libSystem.B.dylib\0" in image
    assert b"_msl_launch\0" in image and b"_msl_library_address\0" in image


def test_the_attention_kernel_compiles(zig, tmp_path, monkeypatch):
    """The text with the most of Metal in it: simdgroup matrices, half precision, templates."""
    import dump_metal_sources

    kernels = {}

    def keep(name, *arguments):
        kernels[name] = write_kernel(name, *arguments)
        return kernels[name]

    monkeypatch.setattr(dump_metal_sources, "write_kernel", keep)
    list(dump_metal_sources.launched("bfloat16", 64, 16))
    unit = tmp_path / "kernel.cl"
    unit.write_text(translation_unit(kernels["paged_varlen"], "paged_varlen"))
    flags = (*compiler._LANGUAGE_FLAGS, *compiler.MAC_FLAGS, *compiler._WARNING_FLAGS, *compiler._CODE_FLAGS)
    build(*zig.kernel_command, *flags, *compiler._UNROLL_FLAGS, "-c", unit, "-o", tmp_path / "kernel.o")
    assert (tmp_path / "kernel.o").read_bytes().startswith(MACH_O_ARM64)


def test_a_mac_runs_kernels_only_if_it_is_told_to(monkeypatch):
    monkeypatch.setattr(compiler.sys, "platform", "darwin")
    monkeypatch.setattr(compiler.platform, "machine", lambda: "arm64")
    monkeypatch.delenv("WORKBENCH_CLANG", raising=False)
    compiler.find_compiler.cache_clear()
    with pytest.raises(msl.MslCompilerMissing, match="set WORKBENCH_CLANG=ziglang"):
        compiler.find_compiler()
    monkeypatch.setenv("WORKBENCH_CLANG", "ziglang")
    assert compiler.find_compiler().kernel_command[1] == "clang"
    compiler.find_compiler.cache_clear()
