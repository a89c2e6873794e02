"""Memory, speed and host link of named devices.

Memory, arithmetic and bandwidth are those of the vendors' data sheets (dense bfloat16, SXM or OAM
modules if there are several). The fractions that kernels reach were measured on an H200 with
torch 2.11: matmuls 690 of 989 TFLOP/s, attention 550 forward and 400 backward, copies to pinned
host memory 55 of 64 GB/s. They are assumed for all devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .._errors import BudgetError, did_you_mean, shown

MATMUL_SHARE = 690 / 989
ATTENTION_SHARE = 550 / 989
ATTENTION_BACKWARD_SHARE = 400 / 989
BANDWIDTH_SHARE = 0.8
LINK_SHARE = 55 / 64
FREE_SHARE = 0.95
"""Of a device's memory, what a step may take by default: the rest is fragmentation."""
GB, TB, TERA = 10**9, 10**12, 10**12


@dataclass(frozen=True)
class Device:
    """A device to plan for.

    Attributes:
        name: the common name.
        memory_bytes: available to the allocator, without the driver's part.
        flops: dense bfloat16 operations per second of the data sheet.
        bandwidth: bytes per second of its memory.
        link: bytes per second to host memory, each way.
        workspace_bytes: allocated by cuBLAS.
    """

    name: str
    memory_bytes: int
    flops: float
    bandwidth: float
    link: float
    workspace_bytes: int = 8 << 20

    def seconds(self, flops: int, moved_bytes: int, *, kind: str = "matmul") -> float:
        """Roofline time of one kernel: the longer of its arithmetic and its memory traffic.

        Args:
            flops: its multiplications and additions.
            moved_bytes: bytes it reads and writes.
            kind: "matmul", "attention" or "attention backward".
        """
        share = {"attention": ATTENTION_SHARE, "attention backward": ATTENTION_BACKWARD_SHARE}
        reached = self.flops * share.get(kind, MATMUL_SHARE)
        return max(flops / reached, moved_bytes / (self.bandwidth * BANDWIDTH_SHARE))

    def copy_seconds(self, copied_bytes: int) -> float:
        """Return the time of a copy to host memory, or back."""
        return copied_bytes / (self.link * LINK_SHARE)


_HOPPER_WORKSPACE = 32 << 20
DEVICES: Sequence[Device] = (
    # NVIDIA A100 datasheet (1758950-r4) and Ampere whitepaper; PCIe 4, 32 GB/s each way.
    Device("A100-40GB", int(39.4 * 2**30), 312 * TERA, 1.555 * TB, 32 * GB),
    Device("A100-80GB", int(79.2 * 2**30), 312 * TERA, 2.039 * TB, 32 * GB),
    # NVIDIA H100 datasheet: SXM5, PCIe 5, 64 GB/s each way. NVIDIA H200 datasheet.
    Device("H100", int(79.1 * 2**30), 989 * TERA, 3.35 * TB, 64 * GB, _HOPPER_WORKSPACE),
    Device("H200", int(139.8 * 2**30), 989 * TERA, 4.8 * TB, 64 * GB, _HOPPER_WORKSPACE),
    # NVIDIA HGX B200 datasheet: 1,000 W; 4,500 with sparsity.
    Device("B200", int(178.4 * 2**30), 2250 * TERA, 8.0 * TB, 64 * GB, _HOPPER_WORKSPACE),
    # NVIDIA L40S datasheet: 362.05, 733 with sparsity.
    Device("L40S", int(44.4 * 2**30), 362 * TERA, 0.864 * TB, 32 * GB),
    # NVIDIA Ada whitepaper, with float32 accumulation.
    Device("RTX-4090", int(23.5 * 2**30), 165 * TERA, 1.008 * TB, 32 * GB),
    # AMD Instinct MI300X data sheet: 1,307.4, PCIe 5.
    Device("MI300X", int(191.0 * 2**30), 1307 * TERA, 5.3 * TB, 64 * GB),
)


def device_named(name: str) -> Device:
    """Return a device of the table, ignoring case.

    Raises:
        BudgetError: no device has this name.

    Example:
        >>> device_named("h100").name
        'H100'
    """
    for device in DEVICES:
        if device.name.lower() == str(name).lower():
            return device
    names = [device.name for device in DEVICES]
    hint = did_you_mean(str(name).upper(), names, otherwise=f"Known are {', '.join(names)}.")
    raise BudgetError(f"sac_policies plan: device {shown(name)} is not in the table. {hint}")
