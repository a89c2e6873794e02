"""The badge of one area, computed from a report.

Counts are exact and count MUST requirements. Green: every claimed profile is conformant. Yellow:
core is conformant. Red: core is not. Grey: no requirement was judged.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchparts_conformance import _report
from torchparts_conformance.requirements._areas import AREAS

_HEX = {"brightgreen": "#3a7d0a", "yellow": "#8a6a00", "red": "#b3261e", "lightgrey": "#5f5f5f"}
_CHARACTER_PX = 6.6
_PADDING_PX = 10


@dataclass(frozen=True)
class Badge:
    """Text and colour of a badge, with the field names of shields.io."""

    area: str
    label: str
    message: str
    color: str
    implementation: str


def badges(report: Mapping[str, Any]) -> list[Badge]:
    """Return the badge of each area of the run."""
    return [_badge(report, area) for area in AREAS if area in report["claims"]["areas"]]


def _badge(report: Mapping[str, Any], area: str) -> Badge:
    judged = _report.judged(report, area)
    return Badge(
        area=area,
        label=f"{area} {report['suite']}",
        message=message(report, area) or "not provided",
        color=_color(judged),
        implementation=_report.title(report),
    )


def message(report: Mapping[str, Any], area: str) -> str:
    """Return the text of a badge, such as `core 19 of 19; robust 12 of 19 | cpu`."""
    judged = _report.judged(report, area)
    devices = dict.fromkeys(v["device"] for v in judged)
    return ", ".join(
        f"{_of_device([v for v in judged if v['device'] == device])} | {device}"
        for device in devices
    )


def _of_device(judged: list[Mapping[str, Any]]) -> str:
    ran = [v for v in judged if v["verdict"] != "no device"]
    return "; ".join(map(_report.counts_of, ran)) or "not run"


def _color(judged: list[Mapping[str, Any]]) -> str:
    words = {v["verdict"] for v in judged}
    core = {v["verdict"] for v in judged if v["profile"] == "core"}
    if words <= {"no device"}:
        return "lightgrey"
    if words == {"conformant"}:
        return "brightgreen"
    return "yellow" if core == {"conformant"} else "red"


def to_shields(badge: Badge) -> str:
    """Write the JSON for a shields.io endpoint badge."""
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
    """Draw the badge as a self-contained SVG."""
    left, right = (_width(text) for text in (badge.label, badge.message))
    label, message = html.escape(badge.label), html.escape(badge.message)
    title = f"{html.escape(badge.implementation)}: {label}: {message}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img" '
        f'aria-label="{title}">\n'
        f"<title>{title}</title>\n"
        f'<rect width="{left}" height="20" fill="#444"/>\n'
        f'<rect x="{left}" width="{right}" height="20" fill="{_HEX[badge.color]}"/>\n'
        f'<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">\n'
        f'<text x="{_PADDING_PX // 2}" y="14" textLength="{left - _PADDING_PX}">{label}</text>\n'
        f'<text x="{left + _PADDING_PX // 2}" y="14" textLength="{right - _PADDING_PX}">'
        f"{message}</text>\n</g>\n</svg>\n"
    )


def _width(text: str) -> int:
    return round(len(text) * _CHARACTER_PX) + _PADDING_PX
