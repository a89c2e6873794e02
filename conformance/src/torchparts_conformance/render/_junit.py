"""A report as JUnit XML; each case has requirement, level and device as properties."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from xml.sax.saxutils import quoteattr

from torchparts_conformance.report import _report
from torchparts_conformance.subject._identity import printable

_ELEMENT = {
    "fail": "failure",
    "xpass": "failure",
    "error": "error",
    "not_run": "error",
    "xfail": "skipped",
    "not_claimed": "skipped",
    "not_provided": "skipped",
    "no_device": "skipped",
}


def to_junit(report: Mapping[str, Any]) -> str:
    """Write one test case for each row of a report."""
    rows = report["rows"]
    kinds = [_ELEMENT.get(row["outcome"], "") for row in rows]
    counts = {
        "tests": len(rows),
        "failures": kinds.count("failure"),
        "errors": kinds.count("error"),
        "skipped": kinds.count("skipped"),
    }
    header = " ".join(f'{word}="{number}"' for word, number in counts.items())
    facts = {
        "suite.version": report["suite"]["version"],
        "implementation": report["implementation"]["name"],
        "implementation.version": report["implementation"]["version"],
        "torch": report["environment"]["torch"],
        "verdict": report["verdict"],
        "digest": report["digest"],
    }
    return (
        '<?xml version="1.0" encoding="utf-8"?>\n'
        f'<testsuites>\n<testsuite name="torchparts-conformance" {header}>\n'
        f"{_properties(facts)}{''.join(map(_case, rows))}</testsuite>\n</testsuites>\n"
    )


def _case(row: Mapping[str, Any]) -> str:
    facts = {word: row[word] for word in ("id", "level", "device", "profile", "outcome")}
    facts["requirement"] = facts.pop("id")
    element = _ELEMENT.get(row["outcome"])
    message = quoteattr(printable(_report.reason_of(row), limit=500))
    detail = f"<{element} message={message} type={_quoted(row['outcome'])}/>\n" if element else ""
    name = _quoted(f"{row['id']} {row['case']} [{row['device']}]")
    return (
        f'<testcase classname={_quoted(row["area"])} name={name} time="{row["duration_s"]:.3f}">\n'
        f"{_properties(facts)}{detail}</testcase>\n"
    )


def _properties(facts: Mapping[str, str]) -> str:
    lines = (f"<property name={_quoted(k)} value={_quoted(v)}/>\n" for k, v in facts.items())
    return f"<properties>\n{''.join(lines)}</properties>\n"


def _quoted(text: str) -> str:
    return quoteattr(printable(text, limit=500))
