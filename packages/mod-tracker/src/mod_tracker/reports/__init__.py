"""Reports per module: floating-point operations, time, memory, a trace.

Each subscribes to the tracker, or puts a mode of its own around the code, and adds amounts up by
module and phase. Uses the tracker's files; none of them knows of a report.
"""

from ._flops import FlopReport, profile_flops
from ._memory import MemoryReport, profile_memory
from ._report import PhaseRow, Report
from ._time import TimeReport, profile_time
from ._trace import TraceReport, trace

__all__ = [
    "FlopReport",
    "MemoryReport",
    "PhaseRow",
    "Report",
    "TimeReport",
    "TraceReport",
    "profile_flops",
    "profile_memory",
    "profile_time",
    "trace",
]
