"""Hooks of mkdocs: pages that are not in docs/, and links to files outside of docs/, which become the files' names."""

import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.structure.files import Files

README = Path("README.md")
# Pages that are made with the site, and the modules that print them.
MADE = {"settings.md": "torchtrain.config.reference", "api.md": "parity_tests.api"}


def on_files(files: "Files", config: dict) -> "Files":
    """Add README under the name that mkdocs looks for, and the pages that programs make."""
    from mkdocs.structure.files import File  # make test reads this file, and has no mkdocs

    pages = {"index.md": README.read_text(encoding="utf-8")}
    for page, module in MADE.items():
        command = [".venv/bin/python", "-m", module]
        pages[page] = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    for page, content in pages.items():
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, page, **_: object) -> str:
    """Point README's links into docs/, and keep the names alone of files that the site does not hold."""
    if page.file.src_uri == "index.md":
        markdown = re.sub(r"\]\((?!docs/|https?:|#)([^)]+)\)", r"](../\1)", markdown).replace("](docs/", "](")
        markdown = markdown.replace('src="docs/', 'src="')
    return re.sub(r"(?<!!)\[([^\]]+)\]\(\.\./[^)]*\)", r"\1", markdown)
