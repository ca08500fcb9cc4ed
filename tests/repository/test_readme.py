"""README's example prints the output shown in README."""

import contextlib
import io
import re
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_the_example_prints_what_is_shown(smollm2):
    code, shown = re.search(r"```python\n(.*?)```\n\nprints\n\n```\n(.*?)```", README.read_text(), re.DOTALL).groups()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), {})
    assert printed.getvalue() == shown
    assert len(code.strip().splitlines()) <= 10


def test_every_linked_file_is_there():
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", README.read_text())
    assert links and all((README.parent / link).exists() for link in links)
