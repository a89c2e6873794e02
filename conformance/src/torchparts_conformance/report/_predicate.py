"""A report as the predicate of an in-toto test-result attestation.

See https://github.com/in-toto/attestation/blob/main/spec/predicates/test-result.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchparts_conformance.report._outcomes import absent


def predicate(report: Mapping[str, Any]) -> dict[str, Any]:
    """Say what passed and failed; a SHOULD that failed is a warning, a skip is a failure.

    Profiles that were not claimed and areas that are not provided are in no list.
    """
    lists: dict[str, list[str]] = {"passedTests": [], "warnedTests": [], "failedTests": []}
    gone = absent(report["rows"])
    for row in report["rows"]:
        if row["outcome"] != "not_claimed" and (row["area"], row["group"]) not in gone:
            lists[_list_of(row)].append(f"{row['id']} {row['case']} [{row['device']}]")
    suite = report["suite"]
    return {
        "result": "PASSED" if report["verdict"] == "conformant" else "FAILED",
        "configuration": [
            {
                "name": f"{suite['name']} {suite['version']}{_list_of_suite(suite)}",
                "digest": {"sha256": suite["manifest_sha256"] or "0" * 64},
            }
        ],
        **lists,
    }


def _list_of_suite(suite: Mapping[str, Any]) -> str:
    return f", list of {suite['list']['version']}" if "list" in suite else ""


def _list_of(row: Mapping[str, Any]) -> str:
    if row["outcome"] == "pass":
        return "passedTests"
    return "failedTests" if row["level"] == "MUST" else "warnedTests"
