"""The list of implementations whose people asked to be in it: one folder each, and a page.

What an entry is and when it expires, how one is submitted, checked again, labelled and shown.
Uses `verify` and below; only `commands` uses it.
"""
