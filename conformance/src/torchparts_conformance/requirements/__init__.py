"""What an implementation has to do, and which cases check it.

The requirements are read from `spec/` and held to their own rules, the cases are read from their
syntax trees, and `manifest.lock.json` freezes what a version consists of. Uses nothing but the
package's root.
"""
