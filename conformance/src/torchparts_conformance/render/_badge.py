"""The badge of one area, derived from a report and from nothing else.

Rule 1: bright green means that every profile claimed is conformant on every device asked for.
Rule 2: counts are exact and counted in requirements; there is no percentage.
Rule 3: where an implementation has only some groups of an area, the badge names these.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchparts_conformance.report import _outcomes
from torchparts_conformance.requirements._areas import AREAS
from torchparts_conformance.subject._identity import printable

_HEX = {"brightgreen": "#3a7d0a", "yellow": "#8a6a00", "red": "#b3261e", "lightgrey": "#5f5f5f"}
_CHARACTER_PX = 6.6
_PADDING_PX = 10


@dataclass(frozen=True)
class Badge:
    """What a badge says, in shields' words, and what it was derived from."""

    area: str
    label: str
    message: str
    color: str
    implementation: str
    digest: str


def badges(report: Mapping[str, Any]) -> list[Badge]:
    """Give the badge of each area the run was asked about."""
    return [badge(report, area) for area in AREAS if area in report["claims"]["areas"]]


def badge(report: Mapping[str, Any], area: str) -> Badge:
    """Derive the badge of one area."""
    verdicts = [v for v in report["verdicts"] if v["area"] == area]
    message, color = _message(verdicts, report["claims"]["devices"])
    who = f"{report['implementation']['name']} {report['implementation']['version']}"
    return Badge(
        area=area,
        label=f"{area} {printable(report['suite']['version'])}",
        message=message,
        color=color,
        implementation=printable(who, limit=200),
        digest=report["digest"],
    )


def _message(verdicts: list[Mapping[str, Any]], devices: list[str]) -> tuple[str, str]:
    judged = [v for v in verdicts if v["verdict"] != _outcomes.NOT_CLAIMED]
    if all(v["verdict"] == _outcomes.NOT_PROVIDED for v in judged):
        return "not provided", "lightgrey"
    message, color = _about_what_is_there([v for v in judged if not _is_absent(v, judged)], devices)
    groups = dict.fromkeys(v["group"] for v in judged if v["group"])
    there = [g for g in groups if not _is_absent({"group": g}, judged)]
    return (message if len(there) == len(groups) else f"{'+'.join(there)}: {message}"), color


def _is_absent(verdict: Mapping[str, Any], judged: list[Mapping[str, Any]]) -> bool:
    """Say whether a verdict is about a group of which nothing is provided."""
    words = {v["verdict"] for v in judged if v["group"] == verdict["group"]}
    return bool(verdict["group"]) and words == {_outcomes.NOT_PROVIDED}


def _about_what_is_there(judged: list[Mapping[str, Any]], devices: list[str]) -> tuple[str, str]:
    profiles = list(dict.fromkeys(v["profile"] for v in judged))
    good = [p for p in profiles if _holds(judged, p)]
    where = ", ".join(devices)
    if good == profiles:
        return f"{'+'.join(good)} {_count(judged, good)} | {where}", "brightgreen"
    if all(v["verdict"] == _outcomes.NO_DEVICE for v in judged):
        return f"{where}: not run", "lightgrey"
    rest = [p for p in profiles if p not in good]
    missing = f"not {'+'.join(rest)} {_count(judged, rest)}"
    if "core" in good:
        return f"{'+'.join(good)} {_count(judged, good)}, {missing} | {where}", "yellow"
    return f"not conformant {_count(judged, profiles)} | {where}", "red"


def _holds(verdicts: list[Mapping[str, Any]], profile: str) -> bool:
    words = {v["verdict"] for v in verdicts if v["profile"] == profile}
    return words == {_outcomes.CONFORMANT}


def _count(verdicts: list[Mapping[str, Any]], profiles: list[str]) -> str:
    """Count MUSTs that passed and all, over profiles and devices."""
    chosen = [v["must"] for v in verdicts if v["profile"] in profiles]
    return f"{sum(passed for passed, _ in chosen)}/{sum(total for _, total in chosen)}"


def to_shields(badge: Badge) -> str:
    """Write the JSON that a shields endpoint badge reads."""
    content = {
        "schemaVersion": 1,
        "label": badge.label,
        "message": badge.message,
        "color": badge.color,
        "isError": badge.color == "red",
        "cacheSeconds": 3600,
    }
    return json.dumps(content, indent=1) + "\n"


def to_svg(badge: Badge) -> str:
    """Draw the badge; the picture refers to nothing outside itself."""
    left, right = (_width(text) for text in (badge.label, badge.message))
    label, message = html.escape(badge.label), html.escape(badge.message)
    title = f"{html.escape(badge.implementation)}: {label}: {message}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img" '
        f'aria-label="{title}">\n'
        f"<title>{title}</title>\n"
        f"<metadata>{html.escape(badge.digest)}</metadata>\n"
        f'<rect width="{left}" height="20" fill="#444"/>\n'
        f'<rect x="{left}" width="{right}" height="20" fill="{_HEX[badge.color]}"/>\n'
        f'<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">\n'
        f'<text x="{_PADDING_PX // 2}" y="14" textLength="{left - _PADDING_PX}">{label}</text>\n'
        f'<text x="{left + _PADDING_PX // 2}" y="14" textLength="{right - _PADDING_PX}">'
        f"{message}</text>\n</g>\n</svg>\n"
    )


def _width(text: str) -> int:
    return round(len(text) * _CHARACTER_PX) + _PADDING_PX
