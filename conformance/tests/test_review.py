"""What a yearly review looks at: who satisfies a SHOULD, since when, and who suffers without it."""

from __future__ import annotations

import datetime
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchparts_conformance.render import _review
from torchparts_conformance.render._review import Evidence
from torchparts_conformance.requirements import _history
from torchparts_conformance.requirements._history import FrozenList
from torchparts_conformance.requirements._registry import load_registry

ONE = load_registry()["CW-001"]
DAY = datetime.date(2027, 12, 1)
A_YEAR_AGO, LATELY = datetime.date(2026, 11, 1), datetime.date(2027, 11, 1)


@pytest.fixture
def of(make_report):
    """Give a function that makes a report of somebody's implementation."""

    def make(name, outcome="pass", *, distribution=None, **others):
        report = make_report({"CW-002": outcome, **others}, name=name)
        report["implementation"]["distributions"][0]["name"] = distribution or name
        return report

    return make


def _of_two(registry, *reports):
    return _review.evidence([registry["CW-002"]], reports)[0]


def test_those_who_satisfy_it_are_counted(registry, of):
    """Who failed is named apart, who was not asked or lacks it is nowhere."""
    reports = [of("a"), of("b", "fail"), of("c", "not_provided"), of("d", "not_claimed")]
    found = _of_two(registry, *reports, of("e", "error"), of("f", "no_device"))
    assert found.passed == ("a",)
    assert found.failed == ("b", "e")


def test_those_who_share_a_distribution_count_once(registry, of):
    """What one of them satisfies all of them do: they are people of one house."""
    torchs = [of("torch", "fail", distribution="torch"), of("FSDP2", distribution="torch")]
    found = _of_two(registry, *torchs, of("mine"))
    assert found.passed == ("torch", "mine")
    assert found.failed == ()


def test_threads_are_those_that_the_requirement_names(registry, of):
    """Each once, as pages."""
    wild = replace(registry["CW-002"], rationale="pytorch#7; x", torch_deviation="pytorch#7")
    (found,) = _review.evidence([wild], [of("a")])
    assert found.threads == ("https://github.com/pytorch/pytorch/issues/7",)


@pytest.mark.parametrize(
    ("passed", "threads", "years", "stands"),
    [
        (("a", "b"), ("t",), 1.0, "may become a MUST"),
        (("a", "b"), ("t",), 0.9, "stays"),
        (("a",), ("t",), 1.5, "stays"),
        (("a", "b"), (), 5.0, "stays"),
        (("a",), ("t",), 2.0, "withdraw, or say why it stays"),
        ((), (), 1.9, "stays"),
    ],
)
def test_rule_says_what_may_become_of_it(registry, passed, threads, years, stands):
    """A year, two implementations and a thread; or two years and fewer than two."""
    assert Evidence(registry["CW-002"], passed, (), threads).stands(years) == stands


@settings(deadline=None)  # a busy machine is slow
@given(passed=st.integers(0, 5), years=st.floats(0, 10), threads=st.integers(0, 2))
def test_more_evidence_never_speaks_against(passed, years, threads):
    """Whoever may become a MUST still may with one more implementation, thread or year."""

    def stands(passed, years, threads):
        names = tuple(map(str, range(passed)))
        return Evidence(ONE, names, (), ("t",) * threads).stands(years)

    if stands(passed, years, threads) == "may become a MUST":
        for more in ((passed + 1, years, threads), (passed, years + 1, threads)):
            assert stands(*more) == "may become a MUST"
        assert stands(passed, years, threads + 1) == "may become a MUST"


def test_page_lists_each_should_with_its_evidence(registry, of):
    """Since when, by whom, not by whom, and what the rule makes of it."""
    wild = {**registry, "CW-002": replace(registry["CW-002"], rationale="pytorch#7")}
    found = _review.evidence(wild.values(), [of("a"), of("b"), of("c", "fail")])
    page = _review.to_markdown(found, {"0.1.0": A_YEAR_AGO}, DAY)
    (row,) = [line for line in page.splitlines() if line.startswith("| [CW-002]")]
    assert "SHOULD: It SHOULD." in row
    assert "| 0.1.0 | 2: a, b | 1: c | [1](https://github.com/pytorch/pytorch/issues/7) |" in row
    assert row.endswith("| may become a MUST |")
    late = _review.to_markdown(found, {"0.1.0": LATELY}, DAY)
    assert "| stays |" in late
    assert "0.1.0, not released" in _review.to_markdown(found, {}, DAY)


def test_page_without_a_should_says_so(registry, of):
    """And counts what each MUST rests on."""
    musts = [r for r in registry.values() if r.level == "MUST"]
    page = _review.to_markdown(_review.evidence(musts, [of("a"), of("b")]), {}, DAY)
    assert "There is no SHOULD and no MAY" in page
    assert "| ckpt-wrap | 1 | 1 | 0 | 0 | 0 |" in page


def test_new_must_of_core_or_robust_is_found(registry):
    """After the first version it begins as a SHOULD; a capability may begin as a MUST."""
    first = FrozenList("0.1.0", {"CW-002": registry["CW-002"]}, (), {})
    fast = replace(registry["CW-001"], id="CW-003", profile="speed")
    later = FrozenList("0.2.0", {**registry, "CW-003": fast}, (), {})
    assert _review.problems({**registry, "CW-003": fast}, [first, later]) == [
        "CW-001 began as a MUST of core in 0.2.0, but there it begins as a SHOULD and becomes a "
        "MUST by a review"
    ]
    reviewed = FrozenList("0.3.0", {"CW-002": replace(registry["CW-002"], level="MUST")}, (), {})
    assert _review.problems(registry, [first, reviewed]) == []


def test_no_requirement_of_this_suite_began_too_hard():
    """The rule holds for every list there is."""
    lists = [_history.read(version) for version in _history.versions()]
    assert _review.problems(load_registry(), lists) == []
