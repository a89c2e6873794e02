"""Reports in loops that somebody else wrote: a schedule, and callbacks of other people's trainers.

Their events become steps of a `ReportSchedule`. Each library is imported when its callback is made,
and not before: neither is a requirement. Uses the reports; nothing else of the package knows of
this room.
"""
