"""Graphs like CUDA's: operations of a stream are recorded once and run at each replay."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

Pool = tuple[int, int]  # a token, as in torch


class Graph:
    """Recorded work of a device, with its own memory pool.

    `csrc/graphs.h` has the rules of captures and of graph memory.
    """

    def __init__(self, extension: Any) -> None:
        self._graph = extension.Graph()

    def capture_begin(self, pool: Pool | None = None, capture_error_mode: str = "global") -> None:
        """Record operations of the current stream from now on, instead of running them.

        Args:
            pool: from `graph_pool_handle` or another graph, whose memory is shared.
            capture_error_mode: in which threads the host must not wait meanwhile: in all
                ("global"), in this one ("thread_local") or in none ("relaxed").
        Raises:
            RuntimeError: the stream is its device's default one, or is captured already.
        """
        self._graph.capture_begin(pool[1] if pool else 0, capture_error_mode)

    def capture_end(self) -> None:
        """End the capture, on the stream that it began on.

        Raises:
            RuntimeError: the capture broke a rule, or a stream was not joined.
        """
        self._graph.capture_end()

    def replay(self) -> None:
        """Run the recorded operations on the current stream."""
        self._graph.replay()

    def reset(self) -> None:
        """Drop the recorded operations and free their memory."""
        self._graph.reset()

    def pool(self) -> Pool:
        """Return a token for its memory, for graphs that are never replayed at the same time."""
        return 0, self._graph.pool()


class Graphs:
    """The graph functions of `torch.simdev`, with the names of `torch.cuda`."""

    def __init__(self, extension: Any, synchronize: Callable[[], None]) -> None:
        self._C = extension
        self._synchronize = synchronize
        self._streams: dict[int, torch.Stream] = {}

    def offered(self) -> dict[str, Callable[..., Any]]:
        """Return the functions by name."""
        return {
            "Graph": lambda: Graph(self._C),
            "graph": self.graph,
            "graph_pool_handle": self.graph_pool_handle,
            "is_current_stream_capturing": self._C.capturing,
        }

    def graph_pool_handle(self) -> Pool:
        """Return a token for memory that several graphs share."""
        return 0, self._C.new_pool()

    @contextlib.contextmanager
    def graph(
        self,
        graph: Graph,
        pool: Pool | None = None,
        stream: torch.Stream | None = None,
        capture_error_mode: str = "global",
    ) -> Iterator[None]:
        """Capture the operations of the block on a stream, by default one reserved for captures.

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
