"""Graphs: what a stream is given is noted once, and runs each time it is replayed; as CUDA's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

Pool = tuple[int, int]  # a token, as torch's


class Graph:
    """Work of a device that is noted once and replayed, with memory of its own.

    What it may not do while it captures, and what its memory is, are the rules of `csrc/graphs.h`.
    """

    def __init__(self, extension: Any) -> None:
        self._graph = extension.Graph()

    def capture_begin(self, pool: Pool | None = None, capture_error_mode: str = "global") -> None:
        """Note what the current stream is given from now on, instead of running it.

        Args:
            pool: of `graph_pool_handle` or another graph, whose memory is used, too.
            capture_error_mode: in which threads the host may not wait meanwhile: in all
                ("global"), in this one ("thread_local") or in none ("relaxed").
        Raises:
            RuntimeError: the stream is its device's default one, or captures already.
        """
        self._graph.capture_begin(pool[1] if pool else 0, capture_error_mode)

    def capture_end(self) -> None:
        """End it, on the stream that it began on.

        Raises:
            RuntimeError: what was captured broke a rule, or a stream was not waited for.
        """
        self._graph.capture_end()

    def replay(self) -> None:
        """Have the current stream do what was captured."""
        self._graph.replay()

    def reset(self) -> None:
        """Forget what was captured, and let go of its memory."""
        self._graph.reset()

    def pool(self) -> Pool:
        """A token for its memory, for graphs that are never replayed at the same time."""
        return 0, self._graph.pool()


class Graphs:
    """What `torch.simdev` offers for graphs, by the names of `torch.cuda`."""

    def __init__(self, extension: Any, synchronize: Callable[[], None]) -> None:
        self._C = extension
        self._synchronize = synchronize
        self._streams: dict[int, torch.Stream] = {}

    def offered(self) -> dict[str, Callable[..., Any]]:
        """By name."""
        return {
            "Graph": lambda: Graph(self._C),
            "graph": self.graph,
            "graph_pool_handle": self.graph_pool_handle,
            "is_current_stream_capturing": self._C.capturing,
        }

    def graph_pool_handle(self) -> Pool:
        """A token for memory that several graphs use."""
        return 0, self._C.new_pool()

    @contextlib.contextmanager
    def graph(
        self,
        graph: Graph,
        pool: Pool | None = None,
        stream: torch.Stream | None = None,
        capture_error_mode: str = "global",
    ) -> Iterator[None]:
        """Capture what the block does on a stream, by default one that is kept for this.

        Raises:
            RuntimeError: see `capture_begin` and `capture_end`.
        """
        self._synchronize()
        self._C.empty_cache()
        index = torch.accelerator.current_device_index()
        if stream is None:
            if index not in self._streams:
                self._streams[index] = torch.Stream(torch.device("simdev", index))
            stream = self._streams[index]
        with stream:
            graph.capture_begin(pool, capture_error_mode)
            try:
                yield
            finally:
                graph.capture_end()
