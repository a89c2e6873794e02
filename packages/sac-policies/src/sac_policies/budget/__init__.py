"""From a number of bytes to a plan: profiles, solvers, fronts, and measuring whether a plan fits.

Uses `policies`, and runs plans through `checkpoint`.
"""
