"""A report as JUnit XML: every row is a case, and failures, errors and skips are told apart."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

from torchparts_conformance.render import _junit

EVIL = "<script>\"'&\x1b[31m\x00"


def test_junit_tells_failures_errors_and_skips_apart(make_report):
    """Each row is a test case with its requirement, level and device."""
    report = make_report({"CW-001": "fail", "CW-002": "error"}, reason=EVIL)
    root = ET.fromstring(_junit.to_junit(report))
    (suite,) = root.findall("testsuite")
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("2", "1", "1")
    case = suite.find("testcase")
    properties = {p.get("name"): p.get("value") for p in case.iter("property")}
    assert properties["requirement"] == "CW-001"
    assert (properties["level"], properties["device"]) == ("MUST", "cpu")
    assert "<script>" in case.find("failure").get("message")


def test_skip_of_what_is_not_claimed_says_so(make_report):
    """Its row does not."""
    root = ET.fromstring(_junit.to_junit(make_report({"CW-001": "not_claimed"})))
    message = root.find("testsuite/testcase/skipped").get("message")
    assert re.fullmatch(r"profile \S+ is not claimed", message)
