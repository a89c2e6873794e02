"""Reports per module: FLOPs, time, memory, and a trace.

Each report listens to the tracker, or enters a dispatch mode, and adds amounts up by module and
phase. The tracker's files do not import the reports.
"""
