"""Whether a report and a badge are what the suite would have written.

Checks them against the installed requirements and cases, and runs the same implementation again in
a fresh environment. Uses `render` and below, and nothing of `run`.
"""
