"""``workbench course``: the points of every exercise in copies of the course, and notebooks as slides."""

from __future__ import annotations

import argparse
import csv
import sys
from dataclasses import asdict, fields
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import workbench
from workbench.apps.cli.notebooks import COURSE
from workbench.apps.cli.options import Commands, add_command, add_number, add_out_option, say_written
from workbench.apps.cli.say import say
from workbench.base.field_checks import integer
from workbench.base.text import counted, printable

if TYPE_CHECKING:
    from workbench.apps.course.grade import Grade

_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""Beginnings of a formula in a spreadsheet; the last four are the first in full width."""

EXAMPLES = """\
  workbench course grade class/                     every folder of class/ is a copy
  workbench course grade class/ --out grades.csv    a row for every exercise of every copy
  workbench course grade my-course                  one copy"""

_SLIDES = """\
  workbench course slides my-course/07_preemption.ipynb            run it, and write my-course/07_preemption.html
  workbench course slides my-course/07_preemption.ipynb --saved    as it was saved, with its outputs
"""


def add_parser(commands: Commands) -> None:
    """Add ``course`` to the commands."""
    parser = commands.add_parser("course", help="grade copies of the course, and make slides of it")
    inner = parser.add_subparsers(dest="course_command", required=True, metavar="COMMAND")
    grade = add_command(inner, "grade", run, "grade the exercises", examples=EXAMPLES, extra="notebook")
    grade.add_argument("folder", type=Path, metavar="FOLDER", help="a copy of the course, or a folder of copies")
    add_out_option(grade, "FILE.csv", "write a row for every exercise of every copy", before=["--csv"])
    add_number(grade, "--jobs", 2, "answers that run at the same time")
    add_number(grade, "--timeout", 120, "seconds that an answer may take")
    help = "slides of a notebook, in one page that opens without a network"
    slides = add_command(inner, "slides", run_slides, help, examples=_SLIDES, extra="notebook")
    slides.add_argument("notebook", type=Path, metavar="NOTEBOOK", help="a notebook of the course, or a copy")
    add_out_option(slides, "PAGE", "page to write (default: beside the notebook, .html)")
    slides.add_argument("--saved", action="store_true", help="show the saved outputs instead of running the notebook")


def run_slides(options: argparse.Namespace) -> int:
    """Write the slides of a notebook.

    Returns:
        The exit status.

    Raises:
        ValueError: The file is not a notebook with slides, or does not run.
        OSError: The page cannot be written.
    """
    from workbench.apps.course.slides import slides_page

    out = options.out or options.notebook.with_suffix(".html")
    page = slides_page(options.notebook, run=not options.saved)
    out.write_text(page, encoding="utf-8")
    say_written(out, hint="the arrow keys turn the slides")
    return 0


def run(options: argparse.Namespace) -> int:
    """Grade the copies, and print their points and the exercises that are not right.

    Returns:
        The exit status.

    Raises:
        ValueError: The folder holds no copy, or an option is out of range.
        OSError: A file cannot be read or written.
    """
    jobs, timeout = integer("--jobs", options.jobs, 1, 256), integer("--timeout", options.timeout, 1, 3600)
    from workbench.apps.course.grade import grade

    grades = grade(options.folder, COURSE, jobs=jobs, timeout=timeout)
    problem: OSError | None = None
    try:
        if options.out:
            _write_csv(options.out, grades)
    except OSError as error:  # the report has the grades, too
        problem = error
    for copy, group in groupby(grades, key=lambda grade: grade.copy):
        for line in _report(copy, list(group)):
            _print(line)
    if problem is not None:
        raise problem
    if options.out:
        say_written(options.out, counted(len(grades), "row"))
    return 0


def _print(line: str) -> None:
    """Print a line with what students wrote, as far as the terminal has its characters, and steer it by none."""
    encoding = sys.stdout.encoding or "utf-8"
    say(printable(line).encode(encoding, "backslashreplace").decode(encoding))


def _report(copy: str, grades: list[Grade]) -> list[str]:
    """The points of a copy, and a line for each wrong answer; exercises with the same reason share a line."""
    lines = [f"{copy}: {sum(grade.points for grade in grades)} of {sum(grade.of for grade in grades)} points"]
    lost: dict[str, list[str]] = {}
    hints = {}
    for grade in grades:
        if not grade.points:
            lost.setdefault(grade.reason, []).append(f"{grade.notebook[:2]} {grade.exercise}")
            hints[grade.reason] = grade.hint
    for reason, names in lost.items():
        lines.append(f"    {', '.join(names)}: {reason}")
        if len(names) == 1:
            lines.append(f"        Hint: {' '.join(hints[reason].split())}")
    return lines


def _write_csv(path: Path, grades: list[Grade]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow([*(field.name for field in fields(grades[0])), "workbench"])
        for grade in grades:
            rows.writerow([_cell(value) for value in (*asdict(grade).values(), workbench.__version__)])


def _cell(value: str | int) -> str | int:
    """The value of a cell, which a spreadsheet does not take for a formula."""
    if isinstance(value, int):
        return value
    text = printable(value)
    return f"'{text}" if text.lstrip().startswith(_FORMULA) else text
