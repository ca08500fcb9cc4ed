"""Write the full Metal source of every variant of the attention kernels, as MLX hands it to Apple's compiler.

    python scripts/dump_metal_sources.py build/metal                       # on a Mac, with the installed MLX
    python scripts/dump_metal_sources.py build/metal --library libmlx.dylib  # from an unpacked mlx-metal wheel

A file is MLX's own preamble, taken out of its library, followed by the header and the kernel function that
``mx.fast.metal_kernel`` generates. Files are named KERNEL-DTYPE-HEAD_DIM-BLOCK_SIZE.metal. Compile them all:

    for file in build/metal/*.metal; do xcrun metal -std=metal3.1 -c "$file" -o /dev/null; done

With ``--compile RESULTS.json``, the clang that runs kernels on the CPU compiles every file, too, and the counts are
written. Two sections of the preamble hold what only Apple's compiler knows, and others stand in for them: bf16_math.h
calls Apple's built-in functions, and complex.h has constructors by address space.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import workbench  # noqa: F401  (before MLX: it installs the BLAS)

import mlx.core as mx  # isort: skip

from workbench.kernels.attention.dtypes import DTYPES
from workbench.kernels.attention.metal.launch import PagedVarlenKernels
from workbench.kernels.attention.probe import Probe, probe_batch
from workbench.kernels.msl.compiler import syntax_errors
from workbench.kernels.msl.rewrite import rewrite
from workbench.kernels.msl.signature import write_kernel

HEAD_DIMS = (32, 64, 80, 96, 112, 128, 192, 256, 512)
OTHER_SIZES = ((192, 128, False), (96, 64, False), (576, 512, True))
"""Sizes of a key and of a value, and whether values are parts of keys."""
BLOCK_SIZES = (8, 16, 32)
SEQUENCES = ((1, 40), (9, 30))
MARK = b"struct WorkPerThread"
"""In MLX's preamble, and in no other text of its library."""
DECLARED = re.compile(
    r"^(?:METAL_FUNC [^;={(]*|struct |using |enum |constexpr constant \w+ )\b(\w+)(?=[ ({;=])", re.MULTILINE
)
"""Functions, types and constants that begin a line, by name."""

SECTION = re.compile(r'^(?=#line 1 "mlx/backend/metal/kernels/(\w+\.h)")', re.MULTILINE)
HOST_NAME = re.compile(r'^template \[\[host_name\("\w+"\)\]\] \[\[kernel\]\] ', re.MULTILINE)
SHIM = "#include <atomic.h>\n#include <simdgroup_matrix.h>\n"
INSTEAD = {
    "bf16_math.h": "",
    "complex.h": """
        template <typename T>
        struct complex_t {
          T real;
          T imag;
          constexpr complex_t(T re, T im) : real(re), imag(im) {}
        };
        typedef complex_t<float> complex64_t;
    """,
}
"""Sections of the preamble that only Apple's compiler accepts, and what stands in for them."""


def compile_error(source: str) -> str:
    """Errors of the clang behind workbench.kernels.msl in a dumped source; "" if it compiles."""
    head, *sections = SECTION.split(source)
    named = zip(sections[::2], sections[1::2])
    kept = head + "".join(INSTEAD.get(name, text) for name, text in named)
    return syntax_errors(SHIM + rewrite(HOST_NAME.sub("template ", kept)))


def preamble(library: Path) -> str:
    """MLX's preamble: the text in its library that it puts in front of every kernel.

    Raises:
        ValueError: The library does not contain it exactly once.
    """
    content = library.read_bytes()
    if content.count(MARK) != 1:
        raise ValueError(f"{library} contains {MARK.decode()!r} {content.count(MARK)} times, expected once")
    place = content.index(MARK)
    return content[content.rindex(b"\0", 0, place) + 1 : content.index(b"\0", place)].decode()


def names_in_common(head: str, text: str) -> set[str]:
    """Names that a kernel's text declares and that the preamble uses: a second declaration would be ambiguous."""
    return set(DECLARED.findall(text)) & set(re.findall(r"\b[A-Za-z_]\w*\b", head))


def installed_library() -> Path | None:
    """The library of the installed MLX on a Mac."""
    spec = find_spec("mlx")
    folders = spec.submodule_search_locations if spec is not None else None
    paths = [Path(folder) / "lib" / "libmlx.dylib" for folder in folders or ()]
    return next((path for path in paths if path.exists()), None)


def sources() -> Iterator[tuple[str, str]]:
    """Name and generated text of every variant: those that launches of these shapes need."""
    for dtype in DTYPES:
        for head_dim in HEAD_DIMS:
            for block_size in BLOCK_SIZES:
                yield from launched(dtype, head_dim, block_size)
        for sizes in OTHER_SIZES:
            yield from launched(dtype, sizes[0], BLOCK_SIZES[1], *sizes[1:])


def launched(
    dtype: str, head_dim: int, block_size: int, value_dim: int = 0, latent: bool = False
) -> Iterator[tuple[str, str]]:
    """The texts of the launches of one batch: both kernels, whole and split."""
    texts: dict[str, str] = {}

    def recorder(
        name: str, input_names: Sequence[str], output_names: Sequence[str], source: str, header: str = ""
    ) -> Any:
        def launch(
            *, inputs: Sequence[mx.array], output_shapes: Any, output_dtypes: Any, template: Any, **_: Any
        ) -> list[mx.array]:
            types = list(output_dtypes)
            text = write_kernel(name, input_names, output_names, source, header, inputs, types, template, False)
            texts[name] = text.text
            return [mx.zeros(shape, kind) for shape, kind in zip(output_shapes, output_dtypes)]

        return launch

    sizes = {"value_dim": value_dim, "latent": latent}
    batch = probe_batch(Probe("variant", SEQUENCES, 8, 1 if latent else 2, head_dim, block_size, dtype, **sizes))
    kernels = PagedVarlenKernels(recorder)
    arrays = batch.q, batch.k_cache, batch.v_cache, batch.metadata, batch.options
    kernels.attend_v1(*arrays)
    kernels.attend(*arrays)
    kernels.attend(*arrays, kv_split=16)
    dims = f"{head_dim}to{value_dim}" if value_dim else f"{head_dim}"
    for name, text in texts.items():
        yield f"{name}-{dtype}-{dims}-{block_size}", text


def main() -> int:
    """Write the files; print their number."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--library", type=Path, help="libmlx.dylib; the installed one by default")
    parser.add_argument("--compile", type=Path, metavar="RESULTS.json", help="compile all of them with msl's clang")
    options = parser.parse_args()
    library = options.library or installed_library()
    if library is None:
        print("there is no libmlx.dylib here: give --library, from an unpacked mlx-metal wheel", file=sys.stderr)
        return 2
    head = preamble(library)
    options.folder.mkdir(parents=True, exist_ok=True)
    written, common = 0, set()
    for name, text in sources():
        (options.folder / f"{name}.metal").write_text(head + text)
        common |= names_in_common(head, text)
        written += 1
    print(f"{written} files in {options.folder}, each with {len(head):,} characters of MLX's preamble")
    print(f"names that both declare: {', '.join(sorted(common)) or 'none'}")
    if options.compile is None:
        return 1 if common else 0
    errors = {
        path.stem: error
        for path in sorted(options.folder.glob("*.metal"))
        if (error := compile_error(path.read_text()))
    }
    for name, error in errors.items():
        print(f"{name}: {error.splitlines()[0]}", file=sys.stderr)
    results = {
        "mlx": version("mlx"),
        "preamble_sections": [name for name in SECTION.findall(head) if name not in INSTEAD],
        "replaced_sections": [name for name in SECTION.findall(head) if name in INSTEAD],
        "sources": written,
        "compiled": written - len(errors),
        "names_declared_twice": sorted(common),
    }
    options.compile.write_text(json.dumps(results, indent=1) + "\n")
    print(f"{results['compiled']} of {written} compile behind the preamble")
    return 1 if common or errors else 0


if __name__ == "__main__":
    sys.exit(main())
