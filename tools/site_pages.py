"""Hooks of mkdocs: pages of the root become pages of the site, README.md its first one, and links follow them.

Links in the Markdown files are those of the repository, so that they work where the files are read there. A link to a
file that is not a page, such as an example, becomes its text: the site has no copy of it.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
# Path in the repository: path in the site.
ROOT_PAGES = {"README.md": "index.md"} | {
    name: name for name in ("CHANGELOG.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md")
}
_LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>[^):\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages of the root."""
    for name, page in ROOT_PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Returns the page with the links of the repository turned into those of the site."""
    del config
    in_root = page.file.src_uri in ROOT_PAGES.values()
    folder = posixpath.dirname(page.file.src_uri)

    def in_site(link: re.Match[str]) -> str:
        path, _, anchor = link["target"].partition("#")
        if not path:
            return link[0]
        source = posixpath.normpath(path if in_root else posixpath.join("docs", folder, path))
        target = ROOT_PAGES.get(source) or source.removeprefix("docs/")
        if source not in ROOT_PAGES and files.get_file_from_path(target) is None and (ROOT / source).exists():
            return link["text"]
        return f"[{link['text']}]({posixpath.relpath(target, folder or '.')}{'#' if anchor else ''}{anchor})"

    return _LINK.sub(in_site, markdown)
