"""Track which module is running, in forward, recompute and backward, at about 1 us per call.

`ModTracker` is a drop-in for torch's `ModTracker`. `profile_flops`, `profile_time`,
`profile_memory` and `trace` report per module. A `ReportSchedule` runs one of them every n steps
of a training loop. Results of the model do not change. For a timeline of kernels use
`torch.profiler`.

    with ModTracker() as tracker:
        loss = model(batch).sum()      # inside: tracker.stack, tracker.phase, ...
        loss.backward()
"""

from ._errors import (
    HookSlotError,
    MissingExtraError,
    ModTrackerError,
    OptionError,
    StateError,
    UnknownNameError,
)
from ._record import ModuleCall
from ._tracker import ModTracker
from .integrations._callbacks import lightning_callback, transformers_callback
from .integrations._schedule import ReportSchedule
from .reports._flops import FlopReport, profile_flops
from .reports._growth import assert_no_growth
from .reports._memory import MemoryReport, profile_memory
from .reports._memory_page import MemoryPage
from .reports._report import Report
from .reports._rows import PhaseRow
from .reports._time import TimeReport, profile_time
from .reports._trace import TraceReport, trace
from .reports._watch import MemoryWatch, watch_memory

__all__ = [
    "FlopReport",
    "HookSlotError",
    "MemoryPage",
    "MemoryReport",
    "MemoryWatch",
    "MissingExtraError",
    "ModTracker",
    "ModTrackerError",
    "ModuleCall",
    "OptionError",
    "PhaseRow",
    "Report",
    "ReportSchedule",
    "StateError",
    "TimeReport",
    "TraceReport",
    "UnknownNameError",
    "assert_no_growth",
    "lightning_callback",
    "profile_flops",
    "profile_memory",
    "profile_time",
    "trace",
    "transformers_callback",
    "watch_memory",
]

__version__ = "0.1.0"
