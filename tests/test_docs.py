"""The documentation: its links lead somewhere, and what is generated is what the code says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_internal_links_lead_somewhere(page: Path):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page}: {target}"
        assert ROOT in file.parents, f"{page}: {target}"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{page}: {target}"


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub and mkdocs give a page's headings."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), flags=re.MULTILINE)
    return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip()) for title in titles}


def test_reference_pages_are_current():
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "reference.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    for page in ROOT.glob("docs/**/*.md"):
        assert str(page.relative_to(ROOT / "docs")) in navigation, page
