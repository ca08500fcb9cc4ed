"""Print the changelog's section of a version, for the page of its release: `python scripts/release_text.py 0.2.0`."""

import re
import sys
from pathlib import Path

CHANGELOG = Path(__file__).parents[1] / "CHANGELOG.md"


def release_text(changelog: str, version: str) -> str:
    """The section of a version, without its heading.

    Raises:
        ValueError: The changelog has no such section.
    """
    found = re.search(rf"^## {re.escape(version)}( .*)?\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"CHANGELOG.md has no section '## {version}': rename 'Unreleased' before the tag")
    return found[2].strip() + "\n"


if __name__ == "__main__":
    try:
        print(release_text(CHANGELOG.read_text(encoding="utf-8"), sys.argv[1]), end="")
    except ValueError as problem:
        sys.exit(str(problem))
