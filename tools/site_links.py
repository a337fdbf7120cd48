"""MkDocs hook: links of the pages that lead out of docs/, which a site cannot have, become the names of their files."""

import re
from typing import Any

OUTWARD = re.compile(r"\[([^\]]*)\]\(\.\./([^)#\s]+)[^)]*\)")
PAGES = {"README.md": "index.md"}
"""Files outside docs/ whose place a page of the site takes."""


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return a page's text with each link to ``../FILE`` replaced by that of its page, or by text and name."""

    def inward(link: re.Match[str]) -> str:
        text, target = link.groups()
        if target in PAGES:
            return f"[{text}]({PAGES[target]})"
        return f"`{target}`" if text.strip("`") == target else f"{text} (`{target}`)"

    return OUTWARD.sub(inward, markdown)
