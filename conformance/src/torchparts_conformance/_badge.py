"""The badge of one area, computed from a report.

It is about core. Counts are exact and count MUST requirements. Green: conformant. Red: not
conformant. Grey: no requirement was judged.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchparts_conformance import _report
from torchparts_conformance.requirements._areas import AREAS, CORE

_HEX = {"brightgreen": "#3a7d0a", "red": "#b3261e", "lightgrey": "#5f5f5f"}
_CHARACTER_PX = 6.6
_PADDING_PX = 10


@dataclass(frozen=True)
class Badge:
    """Text and colour of a badge."""

    area: str
    label: str
    message: str
    color: str
    implementation: str


def badges(report: Mapping[str, Any]) -> list[Badge]:
    """Return the badge of each area of the run that has requirements of core."""
    found = {v["area"] for v in report["verdicts"] if v["profile"] == CORE}
    return [_badge(report, area) for area in AREAS if area in found]


def _badge(report: Mapping[str, Any], area: str) -> Badge:
    judged = _judged(report, area)
    return Badge(
        area=area,
        label=f"{area} {report['suite']}",
        message=_message(judged) or "not provided",
        color=_color(judged),
        implementation=_report.title(report),
    )


def _judged(report: Mapping[str, Any], area: str) -> list[Mapping[str, Any]]:
    return [v for v in _report.judged(report, area) if v["profile"] == CORE]


def _message(judged: list[Mapping[str, Any]]) -> str:
    """Return the text of a badge, such as `core 19 of 19 | cpu`."""
    return ", ".join(
        f"{'not run' if v['verdict'] == 'no device' else _report.counts_of(v)} | {v['device']}"
        for v in judged
    )


def _color(judged: list[Mapping[str, Any]]) -> str:
    words = {v["verdict"] for v in judged}
    if words <= {"no device"}:
        return "lightgrey"
    return "brightgreen" if words == {"conformant"} else "red"


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
