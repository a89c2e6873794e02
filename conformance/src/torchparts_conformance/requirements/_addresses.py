"""The public addresses that requirements give as their reasons.

Rule 1: an address reads `owner/repo#7`, `name#7` for the names in `REPOSITORIES`, or `https://...`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

REPOSITORIES: Mapping[str, str] = {
    "pytorch": "pytorch/pytorch",
    "Lightning": "Lightning-AI/pytorch-lightning",
    "metaseq": "facebookresearch/metaseq",
}
_CANDIDATE = re.compile(r"[\w./-]*#\S*|\w+://\S*")
_ISSUE = re.compile(r"(?:([A-Za-z0-9-]+/[A-Za-z0-9._-]+)|([A-Za-z]+))#([1-9]\d{0,6})")
_URL = re.compile(r"https://[a-z0-9.-]+\.[a-z]{2,}(?:/[\w./%#?=&~+-]*)?")


def addresses(text: str) -> list[str]:
    """Give the pages that a text names, in order.

    Raises:
        ValueError: something in it looks like an address and is none.
    Example:
        >>> addresses("pytorch#96136; reproduced on 2.13")
        ['https://github.com/pytorch/pytorch/issues/96136']
    """
    return [_page(found.rstrip(".,;:)")) for found in _CANDIDATE.findall(text)]


def _page(word: str) -> str:
    if _URL.fullmatch(word):
        return word
    issue = _ISSUE.fullmatch(word)
    repository = issue and (issue[1] or REPOSITORIES.get(issue[2]))
    if not issue or not repository:
        names = ", ".join(f"{name}#7" for name in REPOSITORIES)
        raise ValueError(
            f"{word!r:.80} is no address, but those read owner/repo#7, {names} or https://..."
        )
    return f"https://github.com/{repository}/issues/{issue[3]}"
