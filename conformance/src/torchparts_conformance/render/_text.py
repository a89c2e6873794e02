"""Words of a report, which may be a stranger's, as the text of a page."""

from __future__ import annotations

import re
import string

# What no reader of Markdown takes for anything but itself, in a table and in the middle of a line.
_PLAIN = frozenset("-.,/+()'%;? ")


def markdown(text: str) -> str:
    """Give text of which nothing is markup: no link, picture, tag, cell, mention or code.

    Every other sign is written as a character reference, which all dialects read back as text and
    none takes for the start of anything.
    """
    flat = re.sub(r"(?i)www\.", lambda found: found[0][:-1] + "\0", " ".join(text.split()))
    return "".join(
        f"&#{ord('.' if sign == chr(0) else sign)};" if _is_sign(sign) else sign for sign in flat
    )


def _is_sign(sign: str) -> bool:
    return sign == "\0" or (sign in string.punctuation and sign not in _PLAIN)
