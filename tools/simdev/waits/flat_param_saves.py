"""Waits of flat-param's threads and ranks on the host, where a checkpoint is written or read."""

from __future__ import annotations

from ._part import Part

SOURCE = "flat-param/src/flat_param/"
MEETING = SOURCE + "checkpoint/_meeting.py"
STORE_MEETING = SOURCE + "checkpoint/_store_meeting.py"
SAVE = SOURCE + "checkpoint/_sharded_save.py"
WRITER = SOURCE + "checkpoint/_writer.py"
BEHIND = SOURCE + "dcp/_behind.py"
REMOVAL = SOURCE + "dcp/_removal.py"
CHECKPOINT = SOURCE + "dcp/_checkpoint.py"
WRITE = SOURCE + "dcp/_dcp_write.py"
AHEAD = SOURCE + "dcp/_read_ahead.py"

TESTS = "packages/flat-param/tests/"
MEETING_TESTS = (TESTS + "test_meeting.py",)
STORE_TESTS = (TESTS + "test_store_meeting.py",)
WRITER_TESTS = (TESTS + "test_writer.py::test_next_save_waits_for_the_last",)
SAVE_TESTS = (TESTS + "test_sharded_save.py::test_save_waits_for_the_one_before",)
BEHIND_TESTS = (TESTS + "test_behind.py",)
REMOVAL_TESTS = (TESTS + "test_removal.py",)
WRITE_TESTS = (TESTS + "test_dcp_write.py",)
AHEAD_TESTS = (TESTS + "test_read_ahead.py",)

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
    Part(
        "what was put behind is waited for",
        BEHIND,
        "        self._tasks.join()\n",
        "",
        BEHIND_TESTS,
    ),
    Part(
        "closing waits for the task under way",
        BEHIND,
        "            self._thread.join()\n",
        "            pass\n",
        BEHIND_TESTS,
    ),
    Part(
        "room on the disk is waited for",
        REMOVAL,
        "        _last.join()\n",
        "        pass\n",
        REMOVAL_TESTS,
    ),
    Part(
        "a save waits for the room of what was deleted",
        CHECKPOINT,
        "    wait_for_room()\n",
        "",
        REMOVAL_TESTS,
    ),
    Part(
        "deleting waits for the room of what was deleted before",
        REMOVAL,
        "    wait_for_room()\n    _last =",
        "    _last =",
        REMOVAL_TESTS,
    ),
    Part(
        "checksums of what is written are waited for",
        WRITE,
        "        self._behind.wait()\n",
        "",
        WRITE_TESTS,
    ),
    Part(
        "the sync of what is written is waited for",
        WRITE,
        "        behind.wait()\n    write_file",
        "    write_file",
        WRITE_TESTS,
    ),
    Part(
        "reading ahead waits for its reader",
        AHEAD,
        "        return self._once(lambda: position < self._at + AHEAD_BYTES)\n",
        "        return True\n",
        AHEAD_TESTS,
    ),
    Part(
        "reading ahead waits until something is wanted",
        AHEAD,
        "            self._moved.wait_for(lambda: self._is_over or ready())\n",
        "",
        AHEAD_TESTS,
    ),
    Part(
        "no reading ahead goes on after a load",
        AHEAD,
        "            self._thread.join()\n",
        "            pass\n",
        AHEAD_TESTS,
    ),
)
