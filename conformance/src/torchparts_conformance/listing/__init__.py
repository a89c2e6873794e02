"""The list of implementations whose maintainers asked to be in it: one TOML file each.

Makes an entry from a report, runs an entry again, and renders the page of all. Uses `verify` and
below; only `commands` and the build of the site use it.
"""
