"""The page of all entries, with their labels and dated badges, as it is on one day."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torchparts_conformance._errors import ReportError
from torchparts_conformance.listing import _entry, _submit
from torchparts_conformance.listing._entry import VERIFIED, Day, Entry
from torchparts_conformance.render import _badge, _render
from torchparts_conformance.render._badge import Badge
from torchparts_conformance.render._text import markdown
from torchparts_conformance.verify import _verify
from torchparts_conformance.verify._verify import Expected

PAGE = "index.md"
_DAY = re.compile(r"as of (\d{4}-\d\d-\d\d)")
_HEAD = """# Listed implementations

Reports whose maintainers asked to be listed, as of {day}. [How to be listed](../be-listed.md) says
what each label means, who reviews, and what expires.

"""
_TABLE = """| implementation | results | torch | verified | expires | label | contact |
| --- | --- | --- | --- | --- | --- | --- |
"""


def entries(root: Path) -> dict[str, Entry]:
    """Read every entry by `name/version`.

    Raises:
        ReportError: a folder is no entry, or does not have the name of what is in it.
    """
    found = {}
    for folder in sorted(path for path in root.glob("*/*") if path.is_dir()):
        entry = _entry.read(folder)
        if _submit.folder_of(entry.report, root) != folder:
            raise ReportError(
                f"{folder.parent.name}/{folder.name} holds a report of another name or version, "
                "but an entry lies where its report belongs. Submit it again."
            )
        found[f"{folder.parent.name}/{folder.name}"] = entry
    return found


def problems(found: Mapping[str, Entry], expected: Expected) -> list[str]:
    """Give what is wrong with reports of this version of the suite; others had their own."""
    return [
        f"{name}: {text}"
        for name, entry in found.items()
        if entry.report["suite"]["version"] == expected.version
        for text in _verify.problems(entry.report, None, expected)
    ]


def files(found: Mapping[str, Entry], day: Day) -> dict[str, str]:
    """Give the page and all badges, by path below the list's folder."""
    made = {PAGE: _page(found, day)}
    for name, entry in found.items():
        for badge in dated(entry, day):
            made[f"{name}/badge-{badge.area}.json"] = _badge.to_shields(badge)
            made[f"{name}/badge-{badge.area}.svg"] = _badge.to_svg(badge)
    return made


def write(root: Path, day: Day) -> None:
    """Write the page and the badges of a folder of entries."""
    for name, text in files(entries(root), day).items():
        _render.write(root / name, text)


def drift(root: Path) -> list[str]:
    """Name the files that are not what the entries give on the page's own day."""
    day = _DAY.search(_render.stored(root / PAGE))
    if day is None:
        return [f"{PAGE} has no day; write it again"]
    wanted = files(entries(root), Day.fromisoformat(day[1]))
    return [f"{name} is out of date; write it again" for name in _render.stale(root, wanted)]


def dated(entry: Entry, day: Day) -> list[Badge]:
    """Give an entry's badges: each says its torch and its day, or why it no longer counts."""
    label = entry.label(day)
    if label == VERIFIED:
        torch = _entry.torch_name(entry.report)
        return [
            replace(badge, message=f"{badge.message} | torch {torch} | {entry.earned}")
            for badge in _badge.badges(entry.report)
        ]
    said = f"expired {entry.ending(day)}" if label == "expired" else label
    return [
        replace(badge, message=said, color="lightgrey") for badge in _badge.badges(entry.report)
    ]


def _page(found: Mapping[str, Entry], day: Day) -> str:
    head = _HEAD.format(day=day.isoformat())
    if not found:
        return head + "There are none yet.\n"
    return head + _TABLE + "".join(_row(name, entry, day) for name, entry in found.items())


def _row(name: str, entry: Entry, day: Day) -> str:
    who = entry.report["implementation"]
    pictures = " ".join(
        f"![{badge.area}]({name}/badge-{badge.area}.svg)" for badge in dated(entry, day)
    )
    cells = (
        f"[{markdown(who['name'])} {markdown(who['version'])}]({name}/report.json)",
        pictures,
        markdown(entry.report["environment"]["torch"]),
        str(entry.earned or "-"),
        entry.ending(day),
        _label(entry, day),
        _contact(entry.contact),
    )
    return f"| {' | '.join(cells)} |\n"


def _label(entry: Entry, day: Day) -> str:
    label = entry.label(day)
    if entry.withdrawn is not None:
        return f"{label}: {markdown(entry.withdrawn.reason)}"
    if label == "disputed":
        objection = next(each for each in entry.disputes if not each.answer)
        return f"{label}: {markdown(objection.reason)}"
    return f"[{label}]({entry.runs[-1].by})" if entry.runs else label


def _contact(contact: str) -> str:
    return f"[{markdown(contact)}]({contact})" if _entry.is_address(contact) else markdown(contact)
