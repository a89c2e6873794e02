"""What to keep, as values: rules, how they are built, matched, named, written down and read.

Pure but for operators' facts. Uses no other room.
"""
