"""Waits of flat-param's threads and ranks on the host, where a checkpoint is written or read."""

from __future__ import annotations

from ._part import Part

SOURCE = "flat-param/src/flat_param/"
MEETING = SOURCE + "checkpoint/_meeting.py"
STORE_MEETING = SOURCE + "checkpoint/_store_meeting.py"
SAVE = SOURCE + "checkpoint/_sharded_save.py"
WRITER = SOURCE + "checkpoint/_writer.py"
SYNC = SOURCE + "dcp/_early_sync.py"

TESTS = "packages/flat-param/tests/"
MEETING_TESTS = (TESTS + "test_meeting.py",)
STORE_TESTS = (TESTS + "test_store_meeting.py",)
WRITER_TESTS = (TESTS + "test_writer.py::test_next_save_waits_for_the_last",)
SAVE_TESTS = (TESTS + "test_sharded_save.py::test_save_waits_for_the_one_before",)
SYNC_TESTS = (TESTS + "test_early_sync.py",)

PARTS = (
    Part(
        "a row of the first rank",
        MEETING,
        "    found._wait(lambda: found._get(sizes) is not None, lambda: {0})\n",
        "",
        MEETING_TESTS,
    ),
    Part(
        "the leader waits for calls",
        STORE_MEETING,
        "        self._wait(all_here, lambda: set(range(len(self.ranks))) - set(notes))\n",
        "        all_here()\n",
        STORE_TESTS,
    ),
    Part(
        "others wait for the leader",
        STORE_MEETING,
        "        self._wait(answered, self._absent)\n",
        "        answered()\n",
        STORE_TESTS,
    ),
    Part(
        "the leader goes last",
        STORE_MEETING,
        "                self._wait_until_heard()\n",
        "                pass\n",
        STORE_TESTS,
    ),
    Part(
        "others wait for what is decided",
        STORE_MEETING,
        "        self._wait(decided, lambda: {0})\n",
        "        decided()\n",
        STORE_TESTS,
    ),
    Part(
        "the leader waits for reports",
        STORE_MEETING,
        "self._wait(all_reported, lambda: set(range(len(self.ranks))) - set(reports))",
        "all_reported()",
        STORE_TESTS,
    ),
    Part(
        "the leader waits until others have gone",
        STORE_MEETING,
        "._wait(all_gone, set)\n",
        "\n",
        STORE_TESTS,
    ),
    Part("a save waits for the last", SAVE, "        wait_for_last()\n", "", SAVE_TESTS),
    Part("the last save is waited for", WRITER, "    wait([_last])\n", "", WRITER_TESTS),
    Part("a thread waits until a sync is wanted", SYNC, "self._wanted.wait()", "True", SYNC_TESTS),
    Part(
        "the end waits for the last sync",
        SYNC,
        "            self._thread.join()\n",
        "            pass\n",
        SYNC_TESTS,
    ),
)
