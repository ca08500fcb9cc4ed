"""Puts the notebooks into the package when it is built; everything else is in pyproject.toml."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

COURSE = Path("notebooks")


class BuildWithCourse(build_py):
    """Copies the notebooks and their data into ``workbench/apps/course/notebooks`` of the wheel."""

    def run(self) -> None:
        """Build the package, and add the course. A checkout that is installed in place has them beside it."""
        super().run()
        if self.editable_mode:
            return
        for source in sorted([*COURSE.glob("*.ipynb"), *COURSE.glob("data/*")]):
            target = Path(self.build_lib, "workbench/apps/course", source)
            self.mkpath(str(target.parent))
            self.copy_file(str(source), str(target))


setup(cmdclass={"build_py": BuildWithCourse})
