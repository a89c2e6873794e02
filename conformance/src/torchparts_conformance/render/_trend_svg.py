"""A trend as a picture: a strip for each area, a point for each report, and its count above it.

Rule 1: nothing is told by colour alone; each point has its count, and one that is not conformant is
a ring.
Rule 2: the picture refers to nothing outside itself and runs nothing.
"""

from __future__ import annotations

import html
from collections.abc import Mapping

from torchparts_conformance.render._trend import Count, Point, Trend

_GOOD, _BAD, _INK, _LINE = "#3a7d0a", "#b3261e", "#1b1b1b", "#8a8a8a"
_LEFT_PX, _TOP_PX, _STRIP_PX, _STEP_PX, _FOOT_PX = 110, 46, 56, 120, 40
_HIGH_PX, _RADIUS_PX, _BOLD_PX = 24, 4, 7.6


def to_svg(trend: Trend) -> str:
    """Draw a trend; equal trends give equal bytes."""
    areas, points = trend.areas(), trend.points
    heads = (f"{trend.name} on {trend.device}:", "MUST requirements that passed")
    longest = max(map(len, heads))
    width = max(_LEFT_PX + _STEP_PX * len(points), round(16 + _BOLD_PX * longest))
    height = _TOP_PX + _STRIP_PX * len(areas) + _FOOT_PX
    title = html.escape(" ".join(heads))
    lines = (
        f'<text x="8" y="{16 + 15 * n}" font-weight="bold">{html.escape(line)}</text>\n'
        for n, line in enumerate(heads)
    )
    strips = [
        _strip(area, counts, points, _TOP_PX + number * _STRIP_PX)
        for number, (area, counts) in enumerate(areas.items())
    ]
    feet = [_foot(point, n, height - _FOOT_PX + 14) for n, point in enumerate(points)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" aria-label="{title}">\n'
        f"<title>{title}</title>\n"
        f'<rect width="{width}" height="{height}" fill="#fff"/>\n'
        f'<g font-family="Verdana,DejaVu Sans,sans-serif" font-size="11" fill="{_INK}">\n'
        f"{''.join(lines)}{''.join(strips)}{''.join(feet)}</g>\n</svg>\n"
    )


def _x(number: int) -> int:
    return _LEFT_PX + _STEP_PX // 2 + _STEP_PX * number


def _strip(area: str, counts: Mapping[Point, Count], points: tuple[Point, ...], top: int) -> str:
    floor = top + _STRIP_PX - 12
    places = {
        point: (_x(number), round(floor - counts[point].share * _HIGH_PX, 1))
        for number, point in enumerate(points)
        if point in counts
    }
    right = _LEFT_PX + _STEP_PX * len(points) - 8
    line = " ".join(f"{x},{y}" for x, y in places.values())
    marks = (_mark(counts[point], x, y) for point, (x, y) in places.items())
    return (
        f'<text x="8" y="{floor - _HIGH_PX // 2}">{area}</text>\n'
        f'<path d="M{_LEFT_PX} {floor}H{right}M{_LEFT_PX} {floor - _HIGH_PX}H{right}" '
        f'stroke="{_LINE}" stroke-width=".5" stroke-dasharray="2 3" fill="none"/>\n'
        f'<polyline points="{line}" stroke="{_LINE}" stroke-width="1.5" fill="none"/>\n'
        f"{''.join(marks)}"
    )


def _mark(count: Count, x: int, y: float) -> str:
    color = _GOOD if count.is_conformant else _BAD
    fill = color if count.is_conformant else "#fff"
    return (
        f'<circle cx="{x}" cy="{y}" r="{_RADIUS_PX}" fill="{fill}" stroke="{color}" '
        f'stroke-width="2"/>\n'
        f'<text x="{x}" y="{round(y - 8, 1)}" text-anchor="middle">'
        f"{count.passed}/{count.total}</text>\n"
    )


def _foot(point: Point, number: int, y: int) -> str:
    lines = (f"suite {point.suite}", f"torch {point.torch}")
    return "".join(
        f'<text x="{_x(number)}" y="{y + 13 * n}" text-anchor="middle">{html.escape(line)}</text>\n'
        for n, line in enumerate(lines)
    )
