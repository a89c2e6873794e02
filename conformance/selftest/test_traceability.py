"""Each source test leads to requirements and cases, and a lost one is named."""

from __future__ import annotations

from torchparts_conformance.requirements import _registry, _traceability
from torchparts_conformance.requirements._cases import cases_by_id


def test_all_source_tests_are_traced():
    """All 49 source tests became requirements with cases, and no requirement invents a source."""
    registry = _registry.load_registry()
    sources = _traceability.source_tests()
    by_area = {area: sum(s.area == area for s in sources) for area in _registry.PARTS}
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
