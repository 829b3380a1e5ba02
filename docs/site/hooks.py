"""What mkdocs calls to make the site: the start page, the reference, the navigation, and links.

The documents are written to be read in the repository, with links from file to file. Links to files
that are no pages lead to the repository, whose address is in pyproject.toml.
"""

from __future__ import annotations

import os
import posixpath
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))

from charts import with_charts
from public import OBJECTS, ROOT, pages

URLS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
REFERENCE = "reference/index.md"
# Documents of the repository's root -> their pages.
ROOT_PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
# Guides in the order of a reader; others follow by name.
GUIDES = ("compile", "fuse", "losses", "experts", "distributed", "invariant", "from-liger-kernel")
MAINTAINERS = ("architecture", "testing")
FIGURES = ("measured",)
# A relative link; blocks and spans of code come first, and stay as they are.
LINK_OR_CODE = re.compile(
    r"^```.*?^```|`[^`\n]+`"
    r"|(?P<link>\[(?P<text>(?:`[^`\n]*`|[^][`])*)\]\((?!https?:|#|mailto:)(?P<path>[^)#\s]+)(?P<anchor>#[^)\s]*)?\))",
    re.MULTILINE | re.DOTALL,
)


def on_config(config: Any) -> Any:
    config.site_url = os.environ.get("SITE_URL", f"{URLS['Documentation']}/")
    config.repo_url = URLS["Repository"]
    config.repo_name = posixpath.basename(URLS["Repository"])
    config.nav = navigation()
    return config


def navigation() -> list[Any]:
    docs = {file.stem for file in (ROOT / "docs").glob("*.md")}
    guides = [*GUIDES, *sorted(docs - {*GUIDES, *MAINTAINERS, *FIGURES})]
    reports = sorted(file.name for file in (ROOT / "docs/reports").glob("*.md"))
    internals = sorted(f.name for f in (ROOT / "docs/internals").glob("*.md") if f.stem != "README")
    reference: list[Any] = [REFERENCE]
    for page in pages():
        entries = reference
        for title in page.section:
            entries = _section(entries, title)
        entries.append({page.title: page.path})
    return [
        {"Start": "index.md"},
        {"Guides": [f"{guide}.md" for guide in guides if guide in docs]},
        {"Reference": reference},
        {
            "Figures": [
                *(f"{name}.md" for name in FIGURES),
                *(f"reports/{name}" for name in reports),
            ]
        },
        {
            "Development": [
                "contributing.md",
                *(f"{name}.md" for name in MAINTAINERS),
                {
                    "Mechanisms": [
                        "internals/README.md",
                        *(f"internals/{name}" for name in internals),
                    ]
                },
                "changelog.md",
                "security.md",
            ]
        },
    ]


def _section(entries: list[Any], title: str) -> list[Any]:
    for entry in entries:
        if isinstance(entry, dict) and title in entry:
            return entry[title]
    entries.append({title: []})
    return entries[-1][title]


def on_files(files: Files, config: Any) -> Files:
    readme, ops = divided((ROOT / "README.md").read_text(encoding="utf-8"))
    made = {"index.md": readme, REFERENCE: ops}
    made |= {page.path: page.markdown() for page in pages()}
    for name, page in ROOT_PAGES.items():
        made.setdefault(page, (ROOT / name).read_text(encoding="utf-8"))
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    return files


def divided(readme: str) -> tuple[str, str]:
    """Divide the README into the start page, and the page of the ops, whose table names each."""
    found = re.search(r"^## Ops\n(.*?)(?=^## )", readme, re.MULTILINE | re.DOTALL)
    assert found is not None, "README.md has no section Ops"
    rows = re.sub(r"^\| (`.*?) \| (`.*?) \|", _linked_row, found[1], flags=re.MULTILINE)
    start = f"---\nhide: [navigation]\n---\n{readme.replace(found.group(), '')}"
    return start, f"# Reference\n{rows}"


def _linked_row(row: re.Match[str]) -> str:
    def link(code: re.Match[str]) -> str:
        name = code[1].partition("(")[0]
        for full in (f"liger_ops.{name}", f"liger_ops.nn.{name}"):
            if full in OBJECTS:
                return f"[`{name}`][{full}]"
        return code.group()

    return f"| {re.sub(r'`([^`]+)`', link, row[1])} | {re.sub(r'`([^`]+)`', link, row[2])} |"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    own = page.file.src_uri
    origin = {made: source for source, made in ROOT_PAGES.items()}.get(own, f"docs/{own}")
    if own == REFERENCE:
        origin = "README.md"
    markdown = with_charts(markdown) if own in ("index.md", "measured.md") else markdown

    def retargeted(found: re.Match[str]) -> str:
        if found["link"] is None:
            return found.group()
        text, anchor = found["text"], found["anchor"] or ""
        to = target(found["path"], origin, own, files)
        if text.endswith(".md") and not to.startswith("https:"):
            # A document is named by its path in the repository, and by its title here.
            text = heading(posixpath.normpath(posixpath.join(posixpath.dirname(own), to)))
        return f"[{text}]({to}{anchor})"

    return LINK_OR_CODE.sub(retargeted, markdown)


def heading(page: str) -> str:
    """Return the title of a page that is a document of the repository."""
    sources = {made: source for source, made in ROOT_PAGES.items()}
    text = (ROOT / sources.get(page, f"docs/{page}")).read_text(encoding="utf-8")
    return re.search(r"^# (.*)$", text, re.MULTILINE)[1]  # type: ignore[index]


def target(path: str, origin: str, own: str, files: Files) -> str:
    """Return where a link of a document leads on the site, or in the repository."""
    if path.startswith("/"):
        page = path[1:]
    else:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), path))
        page = ROOT_PAGES.get(path, path.removeprefix("docs/") if path.startswith("docs/") else "")
    if page and files.get_file_from_path(page) is not None:
        return posixpath.relpath(page, posixpath.dirname(own) or ".")
    return f"{URLS['Repository']}/blob/main/{path}"
