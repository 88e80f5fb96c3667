"""A hook of MkDocs: the words of docs/reference/glossary.md have their meanings as a tooltip, where a page first uses them.

The words in bold are those whose use is always the glossary's; others are ordinary words, too ("a
pass", "to pass").
"""

from __future__ import annotations

import re
from html import escape
from pathlib import Path
from typing import Any

GLOSSARY = Path(__file__).parents[1] / "reference/glossary.md"
ROW = re.compile(r"^\| (?P<words>[a-z*, -]+) \| (?P<meaning>.+?) \|", re.MULTILINE)
ABBREVIATION = re.compile(r"<abbr[^>]*>(?P<word>[^<]*)</abbr>")
NO_TOOLTIPS = re.compile(r"<(h[1-6]|a)\b.*?</\1>", re.DOTALL)


def meanings() -> dict[str, str]:
    """Return the meaning of each word in bold, as plain text."""
    found = {}
    for row in ROW.finditer(GLOSSARY.read_text(encoding="utf-8")):
        meaning = row["meaning"].replace("`", "")
        found.update(dict.fromkeys(re.findall(r"\*\*(.+?)\*\*", row["words"]), meaning))
    return found


def forms() -> dict[str, str]:
    """Return the meanings by every form of the words: plural, and at the beginning of a sentence.

    Of a word in -ing only the plural, as the other may be a verb: "finding the first NaN".
    """
    plain = meanings()
    single = {word: meaning for word, meaning in plain.items() if not word.endswith("ing")}
    both = single | {re.sub("y$", "ie", word) + "s": meaning for word, meaning in plain.items()}
    return both | {word.capitalize(): meaning for word, meaning in both.items()}


def on_config(config: Any) -> Any:
    """Give Markdown's abbreviations the words."""
    config.mdx_configs["abbr"] = {
        "glossary": {word: escape(meaning) for word, meaning in forms().items()}
    }
    return config


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Keep the first use of each word in the text of a page; none in headings and links, nor in the glossary."""
    bare = NO_TOOLTIPS.sub(lambda part: ABBREVIATION.sub(r"\g<word>", part[0]), html)
    seen = set() if page.file.src_uri != "reference/glossary.md" else None

    def once(use: re.Match[str]) -> str:
        word = use["word"].lower().removesuffix("s")
        if seen is None or word in seen:
            return use["word"]
        seen.add(word)
        return use[0]

    return ABBREVIATION.sub(once, bare)
