"""Hooks of mkdocs: README is the first page, and links to files outside of docs/ become the files' names."""

import re
from pathlib import Path

from mkdocs.structure.files import File, Files

README = Path("README.md")


def on_files(files: Files, config: dict) -> Files:
    """Add README under the name that mkdocs looks for."""
    files.append(File.generated(config, "index.md", content=README.read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page, **_: object) -> str:
    """Point README's links into docs/, and keep the names alone of files that the site does not hold."""
    if page.file.src_uri == "index.md":
        markdown = re.sub(r"\]\((?!docs/|https?:|#)([^)]+)\)", r"](../\1)", markdown).replace("](docs/", "](")
        markdown = markdown.replace('src="docs/', 'src="')
    return re.sub(r"(?<!!)\[([^\]]+)\]\(\.\./[^)]*\)", r"\1", markdown)
