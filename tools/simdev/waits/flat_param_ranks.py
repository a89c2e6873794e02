"""Waits and events of what flat-param's ranks tell each other; on two ranks."""

from __future__ import annotations

from ._part import Part

SOURCE = "flat-param/src/flat_param/"
BLOCK_ROWS = SOURCE + "checkpoint/_block_rows.py"
CLIP = SOURCE + "comm/_clip.py"
COMM = SOURCE + "comm/_comm.py"
HANDLE = SOURCE + "drop_in/_handle_memory.py"
BY_HAND = SOURCE + "sharded/_by_hand.py"
FULL = SOURCE + "sharded/_full_params.py"
GUARDS = SOURCE + "sharded/_guards.py"
MATERIALIZE = SOURCE + "sharded/_materialize.py"
ORDER = SOURCE + "sharded/_order.py"
SCHEDULE = SOURCE + "sharded/_schedule.py"
GRADS = SOURCE + "sharded/_sharded_grads.py"
MODULE = SOURCE + "sharded/_sharded_module.py"
UNIT = SOURCE + "sharded/_unit.py"

STEPS = ("conformance/simdev/tests/test_sharded.py",)
CALLS = ("conformance/simdev/tests/test_sharded_calls.py",)

PARTS = (
    Part(
        "a collective is waited for",
        COMM,
        "            work.wait()",
        "            pass",
        STEPS,
    ),
    Part(
        "the host waits for gloo",
        COMM,
        "            work.wait(limit)\n",
        "            return True\n",
        ("packages/flat-param/tests/test_comm.py::test_the_host_waits_for_gloo",),
    ),
    Part(
        "a wait is at home",
        COMM,
        "        with at_home(self.home):\n",
        "        if True:\n",
        STEPS,
    ),
    Part(
        "a norm's sum is waited for",
        CLIP,
        "        comm.all_reduce(total, op, of_unit=False).wait()\n",
        "        comm.all_reduce(total, op, of_unit=False)\n",
        CALLS,
    ),
    Part(
        "a norm of each rank's own is waited for",
        CLIP,
        "            comm.all_reduce(sums[-1], dist.ReduceOp.MAX, of_unit=False).wait()\n",
        "            comm.all_reduce(sums[-1], dist.ReduceOp.MAX, of_unit=False)\n",
        CALLS,
    ),
    Part(
        "a flat parameter is whole when it is shown",
        HANDLE,
        "all_gather(full, shard).wait()\n",
        "all_gather(full, shard)\n",
        CALLS,
    ),
    Part(
        "a handle waits",
        BY_HAND,
        "        self._wait()\n",
        "        pass\n",
        CALLS,
    ),
    Part(
        "a gather by hand waits",
        MODULE,
        "begin_unshard(self._flat_param).wait()\n",
        "begin_unshard(self._flat_param)\n",
        CALLS,
    ),
    Part(
        "whole tensors are there",
        FULL,
        "    part.gather_into(full, source=shard).wait()\n",
        "    part.gather_into(full, source=shard)\n",
        CALLS,
    ),
    Part(
        "an overflow of any rank is waited for",
        GUARDS,
        "                comm.all_reduce(largest, dist.ReduceOp.MAX, of_unit=False).wait()\n",
        "                comm.all_reduce(largest, dist.ReduceOp.MAX, of_unit=False)\n",
        CALLS,
    ),
    Part(
        "the first rank's values are waited for",
        MATERIALIZE,
        "            comm.broadcast(whole).wait()\n",
        "            comm.broadcast(whole)\n",
        CALLS,
    ),
    Part(
        "words of order of a shard are waited for",
        ORDER,
        "said[:-ORDER_BYTES]).wait()",
        "said[:-ORDER_BYTES])",
        STEPS,
    ),
    Part(
        "words of order of copies are waited for",
        ORDER,
        "said[ORDER_BYTES:]).wait()",
        "said[ORDER_BYTES:])",
        STEPS,
    ),
    Part(
        "event of the words on the host",
        ORDER,
        "            there.record()\n",
        "",
        STEPS,
    ),
    Part(
        "the host waits for the words",
        ORDER,
        "        due.there.synchronize()\n",
        "        pass\n",
        STEPS,
    ),
    Part(
        "a sum is waited for",
        SCHEDULE,
        "            pending.wait()\n",
        "            pass\n",
        STEPS,
    ),
    Part(
        "a sum begins at home",
        GRADS,
        "        with at_home(self._home):\n            pending =",
        "        if True:\n            pending =",
        CALLS,
    ),
    Part(
        "gradients are handed out at home",
        GRADS,
        "        with at_home(self._home):\n            for index",
        "        if True:\n            for index",
        CALLS,
    ),
    Part(
        "copies are waited for",
        GRADS,
        "        self.comms.replicate.all_reduce(_real(reduced)).wait()\n",
        "        self.comms.replicate.all_reduce(_real(reduced))\n",
        STEPS,
    ),
    Part(
        "a gather is waited for",
        UNIT,
        "            pending.wait()\n",
        "            pass\n",
        STEPS,
    ),
    Part(
        "a gather that nobody needs is waited for",
        COMM,
        "            self.wait()\n        except",
        "            pass\n        except",
        CALLS,
    ),
    Part(
        "a sum is done before the next begins",
        SCHEDULE,
        "        self._finish_reducing(current)  # Rule 2\n",
        "",
        STEPS,
    ),
    Part(
        "the last sum is done before gradients are handed out",
        SCHEDULE,
        "        self._finish_reducing(current)\n        for unit, state",
        "        for unit, state",
        STEPS,
    ),
    Part(
        "rows of blocks are there",
        BLOCK_ROWS,
        "sent.view(-1).view(torch.uint8)).wait()",
        "sent.view(-1).view(torch.uint8))",
        ("packages/flat-param/tests/test_block_rows.py",),
    ),
)
