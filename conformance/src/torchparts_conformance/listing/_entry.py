"""One entry of the list: who maintains an implementation, how it is installed, its results."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torchparts_conformance import _toml
from torchparts_conformance._errors import ReportError
from torchparts_conformance.report import _untrusted_file

MAX_BYTES = 1 << 16
MAX_TEXT = 300
_ADAPTER = re.compile(r"[A-Za-z_][\w.]*(:[A-Za-z_]\w*)?|[a-z][a-z0-9-]*", re.ASCII)
_URL = re.compile(r"https://[a-z0-9.-]+\.[a-z]{2,}(?:/[\w./%#?=&~+@-]*)?", re.ASCII)
_MAIL = re.compile(r"[\w.+-]+@[a-z0-9.-]+\.[a-z]{2,}", re.ASCII)
_DAY = re.compile(r"\d{4}-\d\d-\d\d")
_SLUG = re.compile(r"[^a-z0-9.]+")


@dataclass(frozen=True)
class Entry:
    """What an entry's file says.

    Attributes:
        name: of the implementation.
        version: of the implementation.
        adapter: short name or `module:attribute`, importable once the distributions are installed.
        contact: https or mail address that is read.
        source: https address of the repository.
        date: day of the run.
        suite: version of the suite that ran.
        torch: version of torch that it ran on.
        distributions: what to install, as `name==version`.
        devices: that were asked for.
        areas: that were asked for.
        profiles: that were claimed; empty means all.
        results: the message of each area's badge.
    """

    name: str
    version: str
    adapter: str
    contact: str
    source: str
    date: str
    suite: str
    torch: str
    distributions: tuple[str, ...]
    devices: tuple[str, ...]
    areas: tuple[str, ...]
    profiles: tuple[str, ...]
    results: Mapping[str, str]

    @property
    def file(self) -> str:
        """The name of its file: name and version of the implementation as plain words.

        Raises:
            ReportError: nothing is left of the name or the version.
        """
        words = [_SLUG.sub("-", text.lower()).strip("-.") for text in (self.name, self.version)]
        if not all(words):
            raise ReportError(
                f"implementation {self.name!r:.60} {self.version!r:.60} has a name or a version "
                "without letters and digits, so it cannot name a file. Change it in the adapter."
            )
        return f"{'-'.join(words)}.toml"


def is_adapter(text: str) -> bool:
    """Return whether a text is a short name or `module:attribute`."""
    return _ADAPTER.fullmatch(text) is not None


def is_address(text: str) -> bool:
    """Return whether a text is an https address."""
    return _URL.fullmatch(text) is not None


def is_contact(text: str) -> bool:
    """Return whether a text is an https or a mail address."""
    return is_address(text) or _MAIL.fullmatch(text) is not None


def read(path: Path) -> Entry:
    """Read an entry, which may be malicious.

    Raises:
        ReportError: it cannot be read, or a key is missing, unknown or of another form.
    """
    text = _untrusted_file.read_text(path, role="entry", max_bytes=MAX_BYTES)
    try:
        made = _parse(_toml.parse(text))
    except (ValueError, RecursionError) as error:
        raise ReportError(
            f"entry {path.name!r:.80}: {error!s:.200}. Write it with `torchparts-conformance "
            "submit`."
        ) from error
    if made.file != path.name:
        raise ReportError(
            f"entry {path.name!r:.80} is of {made.name:.60} {made.version:.60}, so its file must "
            f"be {made.file}. Rename it."
        )
    return made


def _parse(data: Mapping[str, Any]) -> Entry:
    wanted = {field.name for field in fields(Entry)}
    if wrong := sorted(wanted ^ data.keys()):
        raise ValueError(f"{', '.join(wrong):.120} is missing or unknown")
    found: dict[str, Any] = {}
    for word, value in data.items():
        if not (_FORMS.get(word) or _is_text)(value):
            raise ValueError(f"{word} is {value!r:.60}, which is of another form")
        found[word] = tuple(value) if isinstance(value, list) else value
    return Entry(**found)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_TEXT and value.isprintable()


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _text_of(is_right: Callable[[str], bool]) -> Callable[[Any], bool]:
    return lambda value: _is_text(value) and is_right(value)


_FORMS: Mapping[str, Callable[[Any], bool]] = {
    "adapter": _text_of(is_adapter),
    "contact": _text_of(is_contact),
    "source": _text_of(is_address),
    "date": _text_of(lambda text: _DAY.fullmatch(text) is not None),
    "distributions": lambda value: _are_texts(value) and all("==" in text for text in value),
    "devices": _are_texts,
    "areas": _are_texts,
    "profiles": _are_texts,
    "results": lambda value: isinstance(value, dict) and _are_texts([*value, *value.values()]),
}


def to_toml(entry: Entry) -> str:
    """Write what `read` reads."""
    lines = []
    for field in fields(Entry):
        value = getattr(entry, field.name)
        if field.name != "results":
            shown = list(value) if isinstance(value, tuple) else value
            lines.append(f"{field.name} = {json.dumps(shown)}")
    lines += ["", "[results]"]
    lines += [f"{json.dumps(area)} = {json.dumps(text)}" for area, text in entry.results.items()]
    return "\n".join(lines) + "\n"
