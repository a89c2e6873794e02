"""Broken implementations against the cases: which requirement catches which, and what none does.

Uses `render`, `subject` and below; `mutants`, at the root, is what a file of them is written with.
"""
