"""Reports per module: floating-point operations, time, memory, a trace.

Each subscribes to the tracker, or puts a mode of its own around the code, and adds amounts up by
module and phase. Uses the tracker's files; none of them knows of a report.
"""

from ._flops import FlopReport, profile_flops
from ._growth import assert_no_growth
from ._memory import MemoryReport, profile_memory
from ._memory_page import MemoryPage
from ._report import PhaseRow, Report
from ._time import TimeReport, profile_time
from ._trace import TraceReport, trace
from ._watch import MemoryWatch, watch_memory

__all__ = [
    "FlopReport",
    "MemoryPage",
    "MemoryReport",
    "MemoryWatch",
    "PhaseRow",
    "Report",
    "TimeReport",
    "TraceReport",
    "assert_no_growth",
    "profile_flops",
    "profile_memory",
    "profile_time",
    "trace",
    "watch_memory",
]
