"""Reports per module: floating-point operations, time, memory, a trace.

Each subscribes to the tracker, or puts a mode of its own around the code, and adds amounts up by
module and phase. Uses the tracker's files; none of them knows of a report.
"""
