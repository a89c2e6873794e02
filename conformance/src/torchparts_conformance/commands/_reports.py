"""The commands that read reports, which may come from strangers; each gives an exit code."""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

from torchparts_conformance import _console
from torchparts_conformance._errors import ReportError
from torchparts_conformance.render import _badge, _render
from torchparts_conformance.report import _diff, _report, _untrusted_file
from torchparts_conformance.subject import _identity
from torchparts_conformance.verify import _installed, _rerun, _verify

MAX_BADGE_BYTES = 1 << 16


def matrix(arguments: argparse.Namespace) -> int:
    """Lay several reports side by side."""
    reports = [_report.read(path) for path in arguments.reports]
    _render.write_matrix(reports, arguments.html, arguments.markdown)
    return 0


def badge(arguments: argparse.Namespace) -> int:
    """Write the badges of a report."""
    for drawn in _badge.badges(_report.read(arguments.report)):
        _render.write(arguments.out / f"badge-{drawn.area}.json", _badge.to_shields(drawn))
        _render.write(arguments.out / f"badge-{drawn.area}.svg", _badge.to_svg(drawn))
    return 0


def diff(arguments: argparse.Namespace) -> int:
    """Print what changed between two reports; a MUST that regressed is a failure."""
    changes = _diff.compare(_report.read(arguments.old), _report.read(arguments.new))
    _console.say(*(map(str, changes) if changes else ["no outcome changed"]))
    return _console.NOT_CONFORMANT if any(change.blocks for change in changes) else 0


def verify(arguments: argparse.Namespace) -> int:
    """Check a report and a badge, and on request run the suite again."""
    report = _report.read(arguments.report)
    wheel = arguments.wheel
    expected = _installed.expected(
        distribution=arguments.distribution,
        wheel_sha256=_sha256(wheel),
        wheel_record_sha256=wheel and _identity.wheel_record_sha256(wheel),
    )
    problems = _verify.problems(report, _text_of(arguments.badge), expected)
    if arguments.rerun and not problems:
        if arguments.impl is None:
            raise ReportError(
                "--rerun was given without --impl, but a report does not choose which code is run. "
                "Add --impl."
            )
        problems = _rerun.rerun(
            report,
            adapter=arguments.impl,
            python=arguments.python,
            source=source_of(arguments),
        )
    if not problems:
        _console.say(
            f"{report['implementation']['name']}: {report['verdict']}, nothing contradicts it"
        )
    return _console.fail(problems, _console.NOT_CONFORMANT)


def source_of(arguments: argparse.Namespace) -> _rerun.Source:
    """Give where a fresh environment gets its distributions from."""
    return _rerun.Source(
        files=tuple(arguments.install),
        pip_options=tuple((arguments.pip_options or "").split()),
        reuses_torch=arguments.reuse_torch,
    )


def _sha256(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ReportError(f"wheel {path.name!r} cannot be read. Name a file.") from error


def _text_of(path: Path | None) -> str | None:
    if path is None:
        return None
    return _untrusted_file.read_text(path, role="badge", max_bytes=MAX_BADGE_BYTES)
