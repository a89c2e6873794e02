"""Broken asynchronous saves of sharded modules; each fails exactly what it declares."""

from __future__ import annotations

from concurrent.futures import Future

from torchparts_conformance.mutants import mutant, overlay

AREA = "flat-param"


class _Late(Future):
    """Looks at the module where somebody asks for the end."""

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


@mutant(area=AREA, kills={"FP-230", "FP-231"})
def snapshot_is_taken_late(part):
    """Copies nothing before somebody waits for the save."""

    def async_save_sharded(module, path, **options):
        return _Late(lambda: part.async_save_sharded(module, path, **options))

    return overlay(part, async_save_sharded=async_save_sharded)


@mutant(area=AREA, kills={"FP-231"})
def save_beside_another_is_passed_over(part):
    """Saves nothing where the one before is under way, and calls it done."""
    last = []

    def async_save_sharded(module, path, **options):
        if last and not last[-1].done():
            return last[-1]
        last.append(part.async_save_sharded(module, path, **options))
        return last[-1]

    return overlay(part, async_save_sharded=async_save_sharded)


@mutant(area=AREA, kills={"FP-232"})
def errors_of_the_thread_are_dropped(part):
    """Asks the future itself, and tells nobody."""

    def async_save_sharded(module, path, **options):
        future = part.async_save_sharded(module, path, **options)
        future.add_done_callback(lambda done: done.exception())
        return future

    return overlay(part, async_save_sharded=async_save_sharded)
