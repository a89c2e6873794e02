"""Tells the peak of a step before it runs: one step is watched, and walked through under a plan.

Uses `budget`'s steps, traces and measuring; `fit` chooses by what is told here.
"""
