"""Describes each page, for search engines, by its first sentence where its head does not."""

from __future__ import annotations

import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

# A paragraph that is no title, list, table, block of code, picture or link to download.
PARAGRAPH = re.compile(r"(?:^|\n\n)(?![#\-|:<!\[]|\d\. )(.+?)(?=\n\n|$)", re.S)
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> None:
    page.meta.setdefault("description", first_sentence(markdown))


def first_sentence(markdown: str) -> str | None:
    found = PARAGRAPH.search(re.sub(r"^```.*?^```$", "", markdown, flags=re.M | re.S))
    if found is None:
        return None  # that of the site
    words = " ".join(LINK.sub(r"\1", found[1]).split()).replace("`", "").replace("*", "")
    return re.split(r"(?<=[.?!]) ", words)[0].rstrip(":")
