"""Memory of a graph, and races with its replays."""

from __future__ import annotations

from functools import partial

import pytest
import torch


class TestMemory:
    """The pool of a graph."""

    def test_is_used_again_within_a_capture(self, sim, device, captured):
        """In the order of the program, and never by operations outside of the capture."""
        x = torch.ones(1000, device=device)
        places = set()

        def chain():
            y = x
            for _ in range(6):
                y = y + 1
                places.add(y.data_ptr())
            return y

        graph, y = captured(chain)
        assert len(places) == 2
        held = [torch.zeros(1000, device=device) for _ in range(8)]
        assert not {each.data_ptr() for each in held} & places
        for _ in range(2):
            graph.replay()
            assert y[0].item() == 7
        assert all(each.sum().item() == 0 for each in held)

    def test_stays_until_the_graph_goes(self, sim, device, captured):
        """Also after the tensors are freed; it is released with the graph."""
        sim.empty_cache()
        before = sim.memory()["reserved"]
        x = torch.ones(1000, device=device)
        graph, y = captured(partial(torch.mul, x, 2))
        del y
        sim.empty_cache()
        assert sim.memory()["reserved"] > before + 4096
        graph.replay()
        del x
        graph.reset()
        sim.empty_cache()
        assert sim.memory()["reserved"] == before

    def test_is_shared_by_graphs_of_one_pool(self, sim, device, captured):
        """Memory that the first graph has freed is reused by the second; live memory is not."""
        pool = sim.graph_pool_handle()
        x = torch.ones(1000, device=device)
        freed = []

        def first():
            y = x * 2
            freed.append(y.data_ptr())
            return y + 1

        one, y = captured(first, pool=pool)
        two, z = captured(lambda: y * 3, pool=one.pool())
        assert pool == one.pool() == two.pool()
        assert z.data_ptr() in freed
        one.replay()
        two.replay()
        assert z[0].item() == 9

    def test_of_a_recorded_block_is_not_used_again_in_its_capture(self, sim, device, side):
        """Events cannot be queried during a capture, so the block is free after it."""
        x = torch.ones(1000, device=device)
        places = []

        def work():
            main = sim.current_stream()
            y = x * 2
            side.wait_stream(main)
            with sim.stream(side):
                y.add_(1)
            y.record_stream(side)
            places.append(y.data_ptr())
            main.wait_stream(side)
            del y
            places.append((x * 2).data_ptr())

        pool = sim.graph_pool_handle()
        graphs = [sim.Graph(), sim.Graph()]
        with sim.graph(graphs[0], pool=pool):
            work()
        assert places[0] != places[1]
        sim.synchronize()
        with sim.graph(graphs[1], pool=pool):
            assert (x * 2).data_ptr() in places
            assert (x * 2).data_ptr() in places

    @pytest.mark.parametrize("end", ["capture_end", "reset"])
    def test_outside_that_was_recorded_and_freed_meanwhile_is_free_afterwards(
        self, sim, device, side, end
    ):
        """Whether the capture ends normally or is abandoned."""
        x, other = torch.ones(1000, device=device), torch.ones(3, device=device)
        place, graph = x.data_ptr(), sim.Graph()
        x.record_stream(side)
        sim.synchronize()
        with sim.stream(sim.Stream(device)):
            graph.capture_begin()
            other.add_(1)
            del x
            getattr(graph, end)()
        sim.synchronize()
        assert place in [torch.ones(1000, device=device).data_ptr() for _ in range(2)]

    def test_of_a_broken_capture_goes_when_its_graph_begins_anew(self, sim, device):
        """With another pool."""
        x = torch.ones(1000, device=device)

        def reserved(is_broken):
            graph = sim.Graph()
            if is_broken:
                with (
                    pytest.raises(RuntimeError, match="previous error"),
                    sim.graph(graph, pool=sim.graph_pool_handle()),
                ):
                    (x * 2).sum().item()
            with sim.graph(graph, pool=sim.graph_pool_handle()):
                x.add_(1)
            sim.empty_cache()
            return sim.memory()["reserved"]

        alone = reserved(is_broken=False)
        assert reserved(is_broken=True) == alone

    def test_pinned_that_a_graph_copies_to_is_not_given_to_others(self, sim, device, captured):
        """A replay writes to it, even if the program has freed it."""
        x = torch.ones(1000, device=device)
        places = []

        def out():
            host = torch.empty(1000, pin_memory=True)
            places.append(host.data_ptr())
            host.copy_(x, non_blocking=True)

        graph, _ = captured(out)
        others = [torch.zeros(1000, pin_memory=True) for _ in range(4)]
        assert places[0] not in [each.data_ptr() for each in others]
        graph.replay()
        sim.synchronize()
        assert all(each.sum() == 0 for each in others)

    def test_pinned_of_a_graph_is_not_given_to_another_of_its_pool(self, sim, device, captured):
        """Replays of both write to it without waiting for each other."""
        x, places = torch.ones(1000, device=device), []

        def out():
            host = torch.empty(1000, pin_memory=True)
            places.append(host.data_ptr())
            host.copy_(x, non_blocking=True)

        one, _ = captured(out, pool=sim.graph_pool_handle())
        two, _ = captured(out, pool=one.pool())
        assert one.pool() == two.pool()
        assert places[0] != places[1]

    def test_that_is_held_back_is_not_asked_for_in_a_capture(self, sim, device, side):
        """Querying an event would break the capture."""
        x, y, graph = torch.ones(1000, device=device), torch.ones(1000, device=device), sim.Graph()
        side.wait_stream(sim.current_stream())
        with sim.stream(side):
            y.add_(1)
        y.record_stream(side)
        del y
        with sim.stream(sim.Stream(device)):
            graph.capture_begin()
            z = x * 2
            graph.capture_end()
        sim.synchronize()
        graph.replay()
        assert z[0].item() == 2

    def test_that_is_not_there_is_told_and_breaks_no_capture(self, sim, device):
        """Cached memory is not released during a capture, since that waits for the device."""
        x, graph = torch.ones(1000, device=device), sim.Graph()
        torch.ones(1 << 18, device=device)  # cached from now on
        sim.synchronize()
        sim.limit(sim.memory()["reserved"] + (1 << 16))
        with sim.stream(sim.Stream(device)):
            graph.capture_begin()
            with pytest.raises(torch.OutOfMemoryError):
                torch.empty(1 << 17, device=device)
            y = x * 2
            graph.capture_end()
        sim.limit(None)
        sim.synchronize()
        graph.replay()
        assert y[0].item() == 2

    def test_that_was_freed_is_seen_when_it_is_replayed(self, sim, device, captured):
        """Inputs must be kept alive by the program."""
        x = torch.ones(1000, device=device)
        graph, _ = captured(partial(torch.mul, x, 2))
        del x
        graph.replay()
        assert any("uses a freed device block" in race for race in sim.races())
        sim.empty_cache()
        graph.replay()
        assert any("replayed on memory that was given up" in race for race in sim.races())


class TestRaces:
    """Replays are ordered by waits of streams, like other work."""

    def test_inputs_that_change_while_a_replay_reads_them(self, sim, device, side, captured):
        """On another stream than the replay's."""
        x = torch.ones(3, device=device)
        graph, _ = captured(lambda: x * 2)
        graph.replay()
        sim.synchronize()
        graph.replay()
        with sim.stream(side):
            x.fill_(2)
        (race,) = sim.races()
        assert "fill" in race
        assert "still read by mul" in race
        side.wait_stream(sim.current_stream())
        with sim.stream(side):
            x.fill_(2)
        sim.current_stream().wait_stream(side)
        graph.replay()
        assert sim.races() == []

    def test_results_that_nobody_waited_for(self, sim, device, side, captured):
        """Read on another stream, also while the next replay writes."""
        x = torch.ones(3, device=device)
        graph, y = captured(lambda: x * 2)
        graph.replay()
        with sim.stream(side):
            y.add(1)
        assert "without waiting for mul" in sim.races()[0]
        side.wait_stream(sim.current_stream())
        with sim.stream(side):
            y.add(1)
        graph.replay()
        assert "still read by add" in sim.races()[0]

    def test_one_graph_waits_for_its_own_last_replay(self, sim, device, side, captured):
        """On any stream; other users of the result do not wait."""
        count = torch.zeros(1, device=device)
        graph, _ = captured(lambda: count.add_(1))
        sim.synchronize()
        graph.replay()
        with sim.stream(side):
            graph.replay()
        assert sim.races() == []
        count.add(1)
        graph.replay()
        sim.synchronize()
        with sim.stream(side):
            graph.replay()
        count.add(1)
        assert "without waiting for add" in sim.races()[0]

    def test_two_graphs_of_one_pool_at_the_same_time(self, sim, device, side, captured):
        """They write to the same memory, so they must run one after the other."""
        pool = sim.graph_pool_handle()
        x = torch.ones(1000, device=device)

        def unkept(factor):
            (x * factor).sum()

        one, _ = captured(partial(unkept, 2), pool=pool)
        two, _ = captured(partial(unkept, 3), pool=pool)
        sim.synchronize()
        one.replay()
        with sim.stream(side):
            two.replay()
        assert sim.races()
        side.wait_stream(sim.current_stream())
        with sim.stream(side):
            two.replay()
        assert sim.races() == []

    def test_a_branch_that_reads_what_its_owner_frees(self, sim, device, side):
        """The allocator reuses it within the capture, so each replay races."""
        x = torch.ones(1000, device=device)

        def work(recorded):
            main = sim.current_stream()
            y = x * 2
            side.wait_stream(main)
            with sim.stream(side):
                z = y + 1
            if recorded:
                y.record_stream(side)
            del y
            w = x * 3
            main.wait_stream(side)
            return z, w

        for recorded in (False, True):
            graph = sim.Graph()
            with sim.graph(graph):
                kept = work(recorded)
            assert sim.races() == []
            graph.replay()
            races = sim.races()
            assert bool(races) is not recorded
            assert all("is still read by add" in race for race in races)
            del kept

    def test_pinned_memory_that_the_host_reads_too_early(self, sim, device, captured):
        """As after any other copy."""
        x, host = torch.ones(3, device=device), torch.zeros(3, pin_memory=True)
        graph, _ = captured(lambda: host.copy_(x, non_blocking=True))
        sim.synchronize()
        graph.replay()
        host.tolist()
        assert "the host uses pinned block" in sim.races()[0]
        sim.synchronize()
        assert host.tolist() == [1, 1, 1]
