"""What the installed suite says a report must agree with."""

from __future__ import annotations

import torchparts_conformance
from torchparts_conformance.requirements import _history, _manifest
from torchparts_conformance.requirements._registry import load_registry
from torchparts_conformance.verify._verify import Expected


def expected(
    *,
    distribution: str | None = None,
    wheel_sha256: str | None = None,
    wheel_record_sha256: str | None = None,
) -> Expected:
    """Give what a report has to say; of a distribution or a wheel, if one is named."""
    return Expected(
        version=torchparts_conformance.__version__,
        manifest=_manifest.load_manifest(),
        registry=load_registry(),
        distribution=distribution,
        wheel_sha256=wheel_sha256,
        wheel_record_sha256=wheel_record_sha256,
        lists=_history.others(torchparts_conformance.__version__),
    )
