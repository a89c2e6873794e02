"""Offloaded values that nobody waits for; each fails what it declares, on the simulated device.

They change the package itself, so each needs a process of its own (`tests/test_broken_order.py`).
"""

from __future__ import annotations

from sac_policies.engines.contexts import _kept
from torchparts_conformance.mutants import mutant

AREA = "sac-policies"


@mutant(area=AREA, kills={"SP-178"})
def hooks_are_handed_bytes_on_their_way(part):
    """Lets the copy to the host be late, whoever reads it next."""
    real = _kept._to_host

    def to_host(tensor, *, late):
        host, arrived = real(tensor, late=True)
        return host, arrived if late else None

    _kept._to_host = to_host
    return part
