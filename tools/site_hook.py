"""Extend MkDocs: add pages for files outside docs/, redirect links to them, and warn of remote resources.

The README is the start page. Programs become pages that show their source, so that every link works offline.
"""

from __future__ import annotations

import ast
import logging
import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "examples/README.md": "examples.md",
}
FOLDERS = ("agents", "benchmarks", "examples", "supervised", "tools")
LINK = re.compile(r'(\]\(|src=")([^)"#:\s]+)')
REMOTE = re.compile(
    r'<(?:script|img|iframe)[^>]* src="?https?:[^>]*>|<link[^>]* rel="?(?:stylesheet|preconnect)"?[^>]*https?:[^>]*>'
)
log = logging.getLogger("mkdocs.site_hook")


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """Add pages for files outside docs/."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    for folder in FOLDERS:
        programs = sorted((ROOT / folder).glob("*.py"))
        lines = [f"# {folder.capitalize()}\n", "| program | description |", "|---|---|"]
        for path in programs:
            text = path.read_text(encoding="utf-8")
            summary = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
            summary = re.sub(r"([|\[])", r"\\\1", summary)
            lines.append(f"| [{path.name}]({path.name}.md) | {summary} |")
            content = f"---\nsearch: {{exclude: true}}\n---\n# {folder}/{path.name}\n\n~~~~~python\n{text}~~~~~\n"
            files.append(File.generated(config, f"source/{folder}/{path.name}.md", content=content))
        if f"{folder}/README.md" not in PAGES:
            files.append(File.generated(config, f"source/{folder}/index.md", content="\n".join(lines) + "\n"))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Convert links between repository files to links between pages."""
    own = page.file.src_uri
    sources = {target: source for source, target in PAGES.items()}
    if own == "index.md":
        page.meta["hide"] = ["navigation"]
    here = PurePosixPath(sources.get(own, f"docs/{own}")).parent

    def relink(match: re.Match[str]) -> str:
        path = os.path.normpath(here / match[2])
        if path in PAGES:
            target = PAGES[path]
        elif path.startswith("docs/"):
            target = path.removeprefix("docs/")
        else:
            target = f"source/{path}/index.md" if path in FOLDERS else f"source/{path}.md"
        return match[1] + os.path.relpath(target, PurePosixPath(own).parent)

    return markdown if own.startswith("source/") else LINK.sub(relink, markdown)


def on_post_page(output: str, page: Any, **_: Any) -> None:
    """Warn of resources that a page loads from the network; warnings fail a strict build."""
    for tag in REMOTE.findall(output):
        log.warning("%s loads %s", page.file.src_uri, tag)
