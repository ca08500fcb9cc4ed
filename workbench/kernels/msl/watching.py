"""Values of variables in a recording: ``WATCH(name)`` behind every assignment, without changing the kernel's file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from workbench.kernels.msl.signature import KernelText

_PLACE = r"[A-Za-z_]\w*(?:\.\w+|\[\w+\])*"


def with_watches(text: KernelText, names: Sequence[str]) -> KernelText:
    """The text of a kernel that watches variables; lines keep their numbers.

    An assignment ``m = e;`` becomes ``m = e, WATCH(m);``, which is one statement still. A declaration with a value gets
    a statement behind it.

    Args:
        text: The kernel.
        names: Variables, such as ``total``, ``row.maximum`` or ``sums[2]``, as they are written in the kernel.

    Raises:
        ValueError: A name is not a variable's, or no line consists of an assignment to it.
    """
    header, source = text.header, text.source
    for name in names:
        if not re.fullmatch(_PLACE, name):
            raise ValueError(f"watch has {name!r}: give names of variables, such as total or row.maximum")
        (header, in_header), (source, in_source) = _watched(header, name), _watched(source, name)
        if not in_header + in_source:
            raise ValueError(
                f"watch has {name!r}: the kernel has no line that assigns to it, such as {name} = ...; "
                f"write WATCH({name}); where its value matters"
            )
    return replace(text, header=header, source=source)


def _watched(text: str, name: str) -> tuple[str, int]:
    variable = re.escape(name)
    assigned = rf"^(\s*(?:[^;{{}}/\n]*[)\s])?{variable}\s*(?:[-+*/%&|^]|<<|>>)?=(?!=)[^;{{}}\n]*);(?=\s*(?://[^\n]*)?$)"
    declared = rf"^\s*(?:const\s+)?(?:thread\s+)?[A-Za-z_]\w*(?:<[^;=]*>)?\s+{variable}\s*=[^;]*;"

    def watch(line: re.Match[str]) -> str:
        if re.match(declared, line[0]) and not line[0].lstrip().startswith(("else", "return")):
            return f"{line[0]} WATCH({name});"
        return f"{line[1]}, WATCH({name});"

    return re.subn(assigned, watch, text, flags=re.MULTILINE)
