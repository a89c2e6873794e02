"""The command line: options, one function for each command, exit codes.

Uses every other room, and is used by `__main__` alone.
"""
