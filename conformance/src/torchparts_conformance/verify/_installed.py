"""What the installed suite says a report must agree with."""

from __future__ import annotations

import torchparts_conformance
from torchparts_conformance.requirements._cases import find_cases, load_registry
from torchparts_conformance.verify._verify import Expected


def expected(
    *,
    distribution: str | None = None,
    wheel_sha256: str | None = None,
    wheel_record_sha256: str | None = None,
) -> Expected:
    """Return what a report must agree with; of a distribution or a wheel, if one is named."""
    return Expected(
        version=torchparts_conformance.__version__,
        registry=load_registry(),
        cases=tuple(find_cases()),
        distribution=distribution,
        wheel_sha256=wheel_sha256,
        wheel_record_sha256=wheel_record_sha256,
    )
