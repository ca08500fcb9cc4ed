"""Add a repository's address to the package before it is built: ``python scripts/add_repository_links.py URL TAG``.

README.md links to files beside it, which a page on PyPI cannot show. The links and images become absolute, and
pyproject.toml gets ``project.urls``. Both files of the checkout are changed; the release workflow calls this in a
checkout that it throws away, so neither a fork nor a move of the repository needs an edit.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
RELATIVE = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)]+)\)")


def link_readme(text: str, repository: str, tag: str) -> str:
    """Make the relative links and images of a page absolute; pages of docs/ are those of the site.

    Args:
        text: Markdown.
        repository: Address of the repository, as in "https://github.com/owner/name".
        tag: Tag or branch that the links point to.

    Returns:
        The page with absolute links.
    """

    def absolute(match: re.Match[str]) -> str:
        image, label, path = match.groups()
        if not image and (page := re.fullmatch(r"docs/(.+)\.md(#.*)?", path)):
            return f"[{label}]({site_of(repository)}/{page[1]}/{page[2] or ''})"
        return f"{image}[{label}]({repository}/{'raw' if image else 'blob'}/{tag}/{path})"

    return RELATIVE.sub(absolute, text)


def site_of(repository: str) -> str:
    """Address of the documentation that docs.yml publishes, on GitHub's Pages."""
    owner, name = repository.rsplit("/", 2)[1:]
    return f"https://{owner.lower()}.github.io/{name}"


def add_urls(text: str, repository: str, tag: str) -> str:
    """Add ``project.urls`` to a pyproject.toml.

    Args:
        text: The file's text.
        repository: Address of the repository.
        tag: Tag or branch whose changelog is linked.

    Returns:
        The text with the addresses.

    Raises:
        ValueError: The file has ``project.urls`` already.
    """
    if "[project.urls]" in text:
        raise ValueError("pyproject.toml has [project.urls] already: start from a fresh checkout")
    urls = {
        "Source": repository,
        "Documentation": f"{site_of(repository)}/",
        "Changelog": f"{repository}/blob/{tag}/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }
    return text + "\n[project.urls]\n" + "".join(f'{name} = "{url}"\n' for name, url in urls.items())


def main() -> None:
    """Change both files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("repository", metavar="URL", help="address of the repository")
    parser.add_argument("tag", metavar="TAG", help="tag or branch that the links point to")
    options = parser.parse_args()
    for name, change in (("README.md", link_readme), ("pyproject.toml", add_urls)):
        path = ROOT / name
        path.write_text(change(path.read_text(), options.repository, options.tag))


if __name__ == "__main__":
    main()
