"""Reports per module: floating-point operations, time, memory, a trace.

Each subscribes to the tracker, or puts a dispatch mode around the code, and adds amounts up by
module and phase. The tracker's files do not import any of these.
"""
