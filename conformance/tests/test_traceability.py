"""Each source test leads to requirements and cases, and a lost one is named."""

from __future__ import annotations

import dataclasses

from torchparts_conformance.requirements import _traceability
from torchparts_conformance.requirements._areas import PARTS
from torchparts_conformance.requirements._cases import Case, Mark, cases_by_id, load_registry


def test_all_source_tests_are_traced():
    """All 49 source tests became requirements with cases, and no requirement invents a source."""
    registry = load_registry()
    sources = _traceability.source_tests()
    by_area = {area: sum(s.area == area for s in sources) for area in PARTS}
    assert by_area == {"ckpt-wrap": 7, "mod-tracker": 4, "flat-param": 10, "sac-policies": 28}
    assert (
        _traceability.problems(_traceability.trace(sources, registry, cases_by_id()), registry)
        == []
    )


def test_trace_notices_a_lost_source_test():
    """Without its requirement, a source test is reported as lost."""
    (source, *_) = _traceability.source_tests()
    (problem,) = _traceability.problems(_traceability.trace([source], {}, {}), {})
    assert problem == f"{source.key} has no requirement"


SOURCE = _traceability.SourceTest("ckpt-wrap", "test/distributed/test_x.py", "TestX::test_y")


def _case(id, name, folder):
    return Case("ckpt-wrap", name, 1, "", folder / "test_a.py", (Mark(id, 1, None),))


def test_source_test_has_a_key_a_name_and_a_page():
    assert SOURCE.key == "test_x.py::TestX::test_y"
    assert SOURCE.test == "test_y"
    assert SOURCE.address.startswith("https://github.com/pytorch/pytorch/blob/v")
    assert SOURCE.address.endswith("/test/distributed/test_x.py")


def test_trace_leads_over_requirements_to_each_case_once(registry, tmp_path):
    """A case that checks two of them is there once."""
    registry = {id: dataclasses.replace(r, source=SOURCE.test) for id, r in registry.items()}
    both = [_case(id, "a::both", tmp_path) for id in registry]
    cases = {"CW-001": [both[0]], "CW-002": [both[1], _case("CW-002", "a::one", tmp_path)]}
    (trace,) = _traceability.trace([SOURCE], registry, cases)
    assert trace.requirements == ("CW-001", "CW-002")
    assert trace.cases == ("a::both", "a::one")
    assert _traceability.problems([trace], registry) == []


def test_requirement_without_a_case_and_source_that_is_none_are_named(registry):
    """Each by its own name."""
    registry["CW-001"] = dataclasses.replace(registry["CW-001"], source=SOURCE.test)
    registry["CW-002"] = dataclasses.replace(registry["CW-002"], source="test_z")
    traces = _traceability.trace([SOURCE], registry, {})
    assert _traceability.problems(traces, registry) == [
        "test_x.py::TestX::test_y has no case",
        "CW-002 names test_z, which is no source test",
    ]
