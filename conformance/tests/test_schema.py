"""The suite's own reader of schemas agrees with the reference validator."""

from __future__ import annotations

import json

import jsonschema
import pytest

from torchparts_conformance.report import _report, _schema


def test_report_follows_its_published_schema(make_report):
    """What is written is valid under the schema that is published."""
    schema = json.loads(_report.SCHEMA_FILE.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(make_report(), schema)
    assert _schema.violation(make_report(), schema) == ""


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("rows", 0, "outcome"), "perfect"),
        (("rows", 0, "id"), "CW-1"),
        (("rows", 0, "duration_s"), -1),
        (("rows", 0, "reason"), "x" * 501),
        (("suite", "frozen"), True),
        (("complete",), False),
        (("verdicts", 0, "must"), [1]),
        (("implementation", "name"), ""),
        (("extra",), 1),
    ],
)
def test_schema_refuses_what_jsonschema_refuses(make_report, path, value):
    """The suite's own reader of schemas agrees with the reference validator."""
    report = make_report()
    inner = report
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    schema = json.loads(_report.SCHEMA_FILE.read_text())
    assert not jsonschema.Draft202012Validator(schema).is_valid(report)
    assert _schema.violation(report, schema).startswith("report")
