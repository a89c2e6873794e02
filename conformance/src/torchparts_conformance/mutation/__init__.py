"""Tries each broken implementation on the requirements it declares to break.

Uses `report`, `subject` and below; files of broken implementations are written with `mutants`, at
the root.
"""
