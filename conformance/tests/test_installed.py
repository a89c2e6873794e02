"""What a report has to agree with is what the installed suite is."""

from __future__ import annotations

import torchparts_conformance
from torchparts_conformance.requirements._cases import find_cases, load_registry
from torchparts_conformance.verify import _installed


def test_version_list_and_requirements_are_those_of_this_suite():
    """And nothing is asked about a distribution or a wheel."""
    expected = _installed.expected()
    assert expected.version == torchparts_conformance.__version__
    assert expected.cases == tuple(find_cases())
    assert expected.registry == load_registry()
    assert (expected.distribution, expected.wheel_sha256) == (None, None)


def test_distribution_and_wheel_are_asked_about_where_they_are_named():
    """Each by its own word."""
    expected = _installed.expected(distribution="mine==1.0", wheel_sha256="3" * 64)
    assert (expected.distribution, expected.wheel_sha256) == ("mine==1.0", "3" * 64)
