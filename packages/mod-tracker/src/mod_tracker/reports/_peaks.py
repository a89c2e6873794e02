"""Peak FLOPs of devices by name, for utilization.

Dense matrix products with bfloat16 inputs and float32 accumulation, or float16 where a device has
no bfloat16, from the vendors' data sheets without sparsity.
"""

from __future__ import annotations

import re
from difflib import get_close_matches

from .._errors import OptionError

TERA = 10**12

PEAKS = {
    "V100": 125 * TERA,
    "T4": 65 * TERA,
    "A10": 125 * TERA,
    "A100": 312 * TERA,
    "A800": 312 * TERA,
    "L4": 121 * TERA,
    "L40": 181 * TERA,
    "L40S": 362 * TERA,
    "RTX 3090": 71 * TERA,
    "RTX 4090": 165 * TERA,
    "H20": 148 * TERA,
    "H100 PCIe": 756 * TERA,
    "H100 NVL": 835 * TERA,
    "H100": 989 * TERA,
    "H800": 989 * TERA,
    "H200": 989 * TERA,
    "GH200": 989 * TERA,
    "B200": 2250 * TERA,
    "MI250X": 383 * TERA,
    "MI300X": 1307 * TERA,
    "MI325X": 1307 * TERA,
}
"""FLOPs per second by the words of a device's name that tell it apart."""

_PARTS_OF_DEVICES = {"laptop", "mobile", "mig"}


def peak_of(name: str) -> int:
    """Return the peak FLOPs per second of a device, such as "NVIDIA H100 80GB HBM3".

    Raises:
        OptionError: the device is not known.

    Example:
        >>> peak_of("NVIDIA A100-SXM4-40GB"), peak_of("H100 PCIe")
        (312000000000000, 756000000000000)
    """
    words = _words(name)
    found = [known for known in PEAKS if _words(known) <= words]
    if not found or words & _PARTS_OF_DEVICES:
        close = get_close_matches(name, PEAKS, n=3, cutoff=0.4)
        raise OptionError(
            f"mod_tracker.mfu: no peak is known for the device {name!r}. Pass its FLOPs per second "
            f"as a number, or one of {', '.join(close or PEAKS)}."
        )
    return PEAKS[max(found, key=lambda known: len(_words(known)))]


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.lower()))
