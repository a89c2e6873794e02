"""What an implementation has to do, and which cases check it.

A requirement is declared by the decorator of its first case. Requirements and cases are read from
the syntax trees of the files in `cases/`. Uses nothing but the package's root.
"""
