"""Broken asynchronous saves; each fails exactly the requirements that it declares."""

from __future__ import annotations

from concurrent.futures import Future

from torchparts_conformance.mutants import mutant, overlay


class _Late(Future):
    """A future that reads the module when it is waited for."""

    def __init__(self, begin):
        super().__init__()
        self._begin = begin

    def _end(self):
        self._begun = getattr(self, "_begun", None) or self._begin()
        return self._begun

    def done(self):
        return self._end().done()

    def result(self, timeout=None):
        return self._end().result(timeout)

    def exception(self, timeout=None):
        return self._end().exception(timeout)


@mutant("FP-230")
def snapshot_is_taken_late(part):
    """Copies nothing before the caller waits for the save."""

    def async_save_sharded(module, path, **options):
        return _Late(lambda: part.async_save_sharded(module, path, **options))

    return overlay(part, async_save_sharded=async_save_sharded)
