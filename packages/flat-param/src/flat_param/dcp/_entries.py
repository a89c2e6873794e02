"""Reads entries of one of a checkpoint's files: each from its first byte to its last, once.

Rule 1: a tensor's elements go from the file to where they belong. Where that is not one piece of
        host memory of the same dtype, they go to a tensor of their own, and are copied from there.
Rule 2: the checksum is of the bytes that were read, and is compared after the last of them: what
        was to be filled has other values after an error. Nothing that was read is unpickled
        before.
Rule 3: torch reads values, and tensors that `find_saved_tensor` knows nothing of, with
        `weights_only=True`; and in a thread of ours, where no signal's handler runs: what a
        handler raises between two calls of the file, such as KeyboardInterrupt for Ctrl-C, torch
        makes a ValueError of, and a checkpoint would seem damaged.
Rule 4: what is about to be overwritten is handed out first, in another thread, a few entries ahead:
        it is copied while those before are read.
Rule 5: who has the disk read ahead of all that is told how far it is, see `_read_ahead`.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._errors import CheckpointError
from ..memory._huge_pages import prefer_huge_pages
from ._checksum import Checksums, Goal
from ._saved_tensor import SavedTensor, find_saved_tensor, memory_of
from ._stored import Place, StoredChunk

_RUN_BYTES, _RUNS_AHEAD = 4 << 20, 6

Keep = Callable[[Iterable[Tensor]], None]


@dataclass
class Read:
    """One entry of a file, and where parts of it go."""

    key: str
    place: Place
    chunk: StoredChunk | None = None
    dtype: torch.dtype | None = None
    copies: list[tuple[tuple[slice, ...], Tensor]] = field(default_factory=list)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of the rectangle, where it is one."""
        return () if self.chunk is None else self.chunk.sizes


class EntryFile(AbstractContextManager["EntryFile"]):
    """A file of which some entries are read, from one position on.

    Args:
        path: of the file.
        comes_to: is told of each entry's first byte when it is read (Rule 5).
    """

    def __init__(self, path: Path, comes_to: Callable[[int], None] = lambda _: None) -> None:
        self._comes_to = comes_to
        self._checksums = Checksums()
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._is_started = False
        self._known: dict[object, tuple[bytes, SavedTensor]] = {}
        with ExitStack() as opened:
            self._file = opened.enter_context(path.open("rb", buffering=0))
            self._helper: Executor = opened.enter_context(ThreadPoolExecutor(1))
            self._opened = opened.pop_all()

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def read(self, reads: Sequence[Read], keep: Keep | None = None) -> Iterator[tuple[Read, Any]]:
        """Fill what entries are read for; each with its value, where it is no tensor.

        Args:
            reads: in their order in the file.
            keep: is given what will be overwritten (Rule 4).

        Raises:
            CheckpointError: another checksum, or another tensor than the metadata says.
            Exception: the file ends, the disk fails, or torch cannot read it.
        """
        for read in reads if keep is None else self._kept(reads, keep):
            yield read, self._carry_out(read)

    def _kept(self, reads: Sequence[Read], keep: Keep) -> Iterator[Read]:
        def hand_out(run: Sequence[Read]) -> Sequence[Read]:
            with torch.no_grad():  # which is a thread's own
                keep(target for read in run for _, target in read.copies)
            return run

        under_way: deque[Future[Sequence[Read]]] = deque()
        for run in _runs(reads):
            under_way.append(self._in_thread(hand_out, run))
            if len(under_way) > _RUNS_AHEAD:
                yield from under_way.popleft().result()
        while under_way:
            yield from under_way.popleft().result()

    def _carry_out(self, read: Read) -> Any:
        self._comes_to(read.place.offset)
        route, place = _Route(read, self._chunk_of, self._saved_tensor), read.place
        found = self._checksums.of(self._file, place.offset, place.length, route.goals)
        if found != place.checksum and place.checksum is not None:
            raise CheckpointError(
                f"flat_param.load: '{read.key}' has the checksum {found:08x} in "
                f"'{self._file.name}', but {place.checksum:08x} was saved. The file is damaged, or "
                "of another checkpoint: load another one."
            )
        if route.is_direct:
            torch.autograd.graph.increment_version([target for _, target in read.copies])
            return None
        loaded = route.chunk
        if loaded is None:
            loaded = self._in_thread(_load, _Part(self._file, place)).result()
        if read.chunk is None:
            return loaded
        _check_loaded(read, loaded)
        for source, target in read.copies:
            target.copy_(loaded[source])
        return None

    def _in_thread(self, function: Callable[..., Any], argument: object) -> Future[Any]:
        """Call a function in the thread of ours, which begins with nothing to do.

        Nobody waits for a thread that Ctrl-C comes to as it starts. It would go on with a file that
        is closed by then, whose number another one may have.
        """
        if not self._is_started:
            self._helper.submit(int)
            self._is_started = True
        return self._helper.submit(function, argument)

    def _saved_tensor(self, read: Read, head: memoryview) -> SavedTensor | None:
        """What the first bytes say; those of the same shape are alike, up to the elements."""
        kind = read.dtype, read.sizes
        first, known = self._known.get(kind, (b"", None))
        if known is not None and head[: len(first)] == first:
            return known
        found = find_saved_tensor(head)
        if found is not None:
            self._known[kind] = bytes(head[: found.start]), found
        return found

    def _chunk_of(self, saved: SavedTensor) -> Tensor:
        """Memory for a stored rectangle that goes elsewhere from there; the next one's too."""
        if self._chunk.numel() < saved.nbytes:
            self._chunk = torch.empty(saved.nbytes, dtype=torch.uint8)
            prefer_huge_pages(self._chunk)
        return self._chunk[: saved.nbytes].view(saved.dtype).view(saved.sizes)


class _Route:
    """The way of one entry's elements to where they belong (Rule 1), told by its first block.

    Args:
        read: the entry.
        chunk_of: memory for all of them.
        saved_tensor: what the first bytes say of it.

    Attributes:
        is_direct: whether they go there at once.
        chunk: where else they go at first; None where torch is to read them (Rule 3).
    """

    def __init__(
        self,
        read: Read,
        chunk_of: Callable[[SavedTensor], Tensor],
        saved_tensor: Callable[[Read, memoryview], SavedTensor | None],
    ) -> None:
        self.is_direct = False
        self.chunk: Tensor | None = None
        self._read, self._chunk_of, self._saved_tensor = read, chunk_of, saved_tensor

    def goals(self, head: memoryview) -> Sequence[Goal]:
        """Where which bytes of the entry go."""
        read = self._read
        saved = None if read.chunk is None else self._saved_tensor(read, head)
        if saved is None or (saved.dtype, saved.sizes) != (read.dtype, read.sizes):
            return ()
        if saved.start + saved.nbytes > read.place.length:
            return ()
        self.is_direct = all(_is_direct(saved, target) for _, target in read.copies)
        if self.is_direct:
            return [_goal(saved, source, target) for source, target in read.copies]
        self.chunk = self._chunk_of(saved)
        return [_goal(saved, (), self.chunk)]


def _runs(reads: Sequence[Read]) -> Iterator[list[Read]]:
    """Neighbours with enough bytes to be worth a call of another thread."""
    run: list[Read] = []
    length = 0
    for read in reads:
        run.append(read)
        length += read.place.length
        if length >= _RUN_BYTES:
            yield run
            run, length = [], 0
    yield run


def _is_direct(saved: SavedTensor, target: Tensor) -> bool:
    """Whether the elements lie in the file as they are to lie in memory."""
    if type(target) is not Tensor or target.is_conj() or target.is_neg():
        return False
    if target.device.type != "cpu" or target.dtype != saved.dtype or not target.is_contiguous():
        return False
    is_whole = True  # in all later dimensions
    for size, length in zip(reversed(saved.sizes), reversed(target.shape), strict=True):
        if not is_whole and length != 1:
            return False
        is_whole = is_whole and size == length
    return True


def _goal(saved: SavedTensor, source: tuple[slice, ...], target: Tensor) -> Goal:
    first, step = 0, target.itemsize
    for size, part in zip(saved.sizes[::-1], source[::-1], strict=False):
        first, step = first + part.start * step, step * size
    return Goal(saved.start + first, target.data_ptr(), memory_of(target))


def _load(part: _Part) -> Any:
    try:
        return torch.load(io.BufferedReader(part), map_location="cpu", weights_only=True)
    except Exception:
        if part.error is not None:  # torch goes on, and raises what comes of that
            raise part.error from None
        raise


def _check_loaded(read: Read, loaded: Any) -> None:
    right = (
        isinstance(loaded, Tensor)
        and loaded.layout is torch.strided
        and loaded.dtype == read.dtype
        and tuple(loaded.shape) == read.sizes
    )
    if not right:
        kind = f"{loaded.dtype} of {tuple(loaded.shape)}" if isinstance(loaded, Tensor) else "no"
        raise CheckpointError(
            f"flat_param.load: the data of '{read.key}' is {kind} tensor, but the metadata says "
            f"{read.dtype} of {read.sizes}. The checkpoint is damaged: load another one."
        )


class _Part(io.RawIOBase):
    """A part of a file as a file of its own.

    Attributes:
        error: what reading the file has raised.
    """

    def __init__(self, file: FileIO, place: Place) -> None:
        super().__init__()
        self.error: OSError | None = None
        self._file, self._offset, self._length, self._at = file, place.offset, place.length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        wanted = min(len(buffer), max(0, self._length - self._at))
        try:
            self._file.seek(self._offset + self._at)
            found = self._file.readinto(memoryview(buffer)[:wanted])
        except OSError as error:
            self.error = error
            raise
        self._at += found or 0
        return found or 0
