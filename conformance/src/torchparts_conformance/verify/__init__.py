"""Whether a report, a badge or a published folder is what the suite would have written.

Checks them against the installed requirements, runs a report's subject anew in a fresh environment,
and asks the network whether sources exist. Uses `render` and below, and nothing of `run`.
"""
