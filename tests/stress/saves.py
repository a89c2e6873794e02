"""Saves on two ranks with killed ranks, a full disk or readers; then a load.

All parameters and optimizer state equal the number of the step, so a load shows whether its values
are of one step, and of which.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import flat_param
from stress.crew import Crew
from stress.ranks import join
from stress.scenes_flat import fill, leftovers, sharded
from stress.trials import Job, Scenario, Trial

WORLD = 2
STEPS = 8
Say = Callable[..., None]


def _trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a sharded model, and an optimizer with state for each parameter."""
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=1.0)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    return model, optimizer


def _be_at(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    fill(model, float(step))
    for state in optimizer.state.values():
        state["momentum_buffer"].fill_(float(step))


def _save_again_and_again(
    rank: int, say: Say, folder: Path, path: Path, first: int, together: bool
) -> None:
    """Save step after step, and report the beginning and end of each."""
    join(folder, rank, WORLD)
    model, optimizer = _trained()
    for step in range(first, first + STEPS):
        _be_at(model, optimizer, step)
        if together:
            dist.barrier()
        say(begun=step)
        flat_param.save_sharded(model, path, optimizer=optimizer)
        say(done=step)


def _save_once(rank: int, say: Say, folder: Path, path: Path, step: int) -> None:
    """Save one step and report the result; then stay alive."""
    join(folder, rank, WORLD)
    model, optimizer = _trained()
    _be_at(model, optimizer, step)
    try:
        flat_param.save_sharded(model, path, optimizer=optimizer, step=step)
        say(saved=step, error="")
    except flat_param.FlatParamError as error:
        say(saved=None, error=str(error))
    dist.barrier()


def _load(rank: int, say: Say, folder: Path, path: Path) -> None:
    """Load, and report the steps of the values."""
    join(folder, rank, WORLD)
    model, optimizer = _trained()
    flat_param.load_sharded(model, path, optimizer=optimizer)
    say(values=sorted(_values(model, optimizer)))


def _values(model: nn.Module, optimizer: torch.optim.Optimizer) -> set[float]:
    state = flat_param.full_state_dict(model, optimizer=optimizer)
    momenta = [each["momentum_buffer"] for each in state["optim"]["state"].values()]
    tensors = [*state["model"].values(), *momenta]
    return {value for tensor in tensors for value in tensor.unique().tolist()}


def _loaded(path: Path) -> tuple[list[float], str]:
    """Return the values that two new ranks load, and what is wrong with them."""
    with Crew(_load, WORLD, path) as crew:
        crew.wait(90)
    told = [words["values"] for words in crew.said if "values" in words]
    if len(told) < WORLD:
        return [], f"cannot be loaded: {crew.last_words()}"
    if told[0] != told[1] or len(told[0]) != 1:
        return [], f"a load gives {told[0]} on one rank and {told[1]} on the other"
    return told[0], ""


def _after(path: Path, steps: range, *, killed: bool = False) -> str:
    """Check that a load gives one of the steps, and that another save leaves no other files."""
    found, why = _loaded(path)
    if why or int(found[0]) not in steps:
        return why or f"step {found[0]} was loaded, but it must be of {steps}"
    with Crew(_save_once, WORLD, path, 99) as crew:
        crew.wait(90)
    if [words["saved"] for words in crew.said if "saved" in words] != [99, 99]:
        return f"the next save fails: {crew.said or crew.last_words()}"
    left = leftovers(path, killed=killed)
    found, why = _loaded(path)
    if why or found != [99.0]:
        return f"after the next save {why or found} is loaded"
    return f"after the next save there is {left}" if left else ""


def _killed(together: bool, whom: str, job: Job) -> tuple[int, Trial]:
    """Kill a rank while ranks save step after step."""

    def trial(number: int) -> str:
        rng, path = job.random(number), job.folder / f"checkpoint-{number}"
        with Crew(_save_again_and_again, WORLD, path, 1, together) as crew:
            crew.until(lambda: crew.count("done") >= WORLD, 90)  # step 1 is saved
            crew.listen_for(rng.uniform(0.0, 0.25))
            victims = [0, 1] if whom == "both" else [rng.randrange(WORLD)]
            for rank in victims:
                crew.kill(rank)
                if whom == "both":
                    crew.listen_for(rng.choice([0.0, rng.uniform(0.0, 0.02)]))
            crew.listen_for(0.1)
        begun = max(words["begun"] for words in crew.said if "begun" in words)
        done = max(words["done"] for words in crew.said if "done" in words)
        return _after(path, range(done, begun + 1), killed=True)

    return job.count or 100, trial


def _full(job: Job) -> tuple[int, Trial]:
    """Save on a disk with too little room, or with just enough."""
    disk = job.folder / "disk"
    disk.mkdir()
    real = _small_disk(disk)
    job.notes["disk"] = "tmpfs" if real else "limit of file size"

    def trial(number: int) -> str:
        rng, path = job.random(number), disk / f"checkpoint-{number}"
        with Crew(_save_once, WORLD, path, 1) as crew:
            crew.wait(90)
        if crew.count("saved") < WORLD:
            return f"the first save fails: {crew.last_words()}"
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        with _little_room(disk, size, rng) if real else _short_files(size, rng):
            with Crew(_save_once, WORLD, path, 2) as crew:
                crew.wait(90)
            told = [words for words in crew.said if "saved" in words]
            errors = {bool(words["error"]) for words in told}
            if len(told) < WORLD or len(errors) > 1:
                return f"ranks end unlike: {told} {crew.last_words()}"
            found, why = _loaded(path)
            expected = 1.0 if errors == {True} else 2.0
            if why or found != [expected]:
                return f"with a full disk, {why or found}; {told}"
            left = leftovers(path)
        why = f"left on the full disk: {left}" if left else _after(path, range(1, 3))
        if not why:
            shutil.rmtree(path)  # the disk has room for one checkpoint and a save's temporary files
        return why

    return job.count or 100, trial


def _read(job: Job) -> tuple[int, Trial]:
    """Load on two other ranks while two ranks save."""

    def trial(number: int) -> str:
        path = job.folder / f"checkpoint-{number}"
        with Crew(_save_once, WORLD, path, 1) as crew:
            crew.wait(90)
        with (
            Crew(_save_again_and_again, WORLD, path, 2, False) as crew,
            Crew(_load_again_and_again, WORLD, path) as readers,
        ):
            crew.wait(90)
            readers.wait(90)
        told = [words["values"] for words in readers.said if "values" in words]
        if readers.count("end") < WORLD:
            return f"a reader ended: {readers.last_words()}"
        mixed = [each for each in told if each is not None and len(each) != 1]
        job.notes["loads"] = str(int(job.notes.get("loads", "0")) + len(told))
        return f"loads gave {mixed}" if mixed else _after(path, range(1 + STEPS, 2 + STEPS))

    return job.count or 50, trial


def _load_again_and_again(rank: int, say: Say, folder: Path, path: Path) -> None:
    join(folder, rank, WORLD)
    model, optimizer = _trained()
    for _ in range(STEPS):
        try:
            flat_param.load_sharded(model, path, optimizer=optimizer)
            say(values=sorted(_values(model, optimizer)))
        except flat_param.CheckpointError as error:
            if "a save to" not in str(error):
                raise
            say(values=None)
    say(end=True)


def _small_disk(folder: Path) -> bool:
    """Mount a small disk in a namespace of this process; return False if that is not allowed."""
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    new_user, new_mounts, private = 0x10000000, 0x00020000, 1 << 18 | 1 << 14
    user, group = os.getuid(), os.getgid()
    if libc.unshare(new_user | new_mounts) != 0:
        return False
    with contextlib.suppress(OSError):
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    libc.mount(b"none", b"/", None, private, None)
    return bool(libc.mount(b"none", os.fsencode(folder), b"tmpfs", 0, b"size=4m") == 0)


@contextlib.contextmanager
def _little_room(disk: Path, size: int, rng: random.Random) -> Iterator[None]:
    """Leave room for a part of a save, or for slightly more than a save."""
    filler, room = disk / "filler", rng.randrange(0, int(1.2 * size))
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    filler.write_bytes(bytes(max(0, free - room)))
    try:
        yield
    finally:
        filler.unlink()


@contextlib.contextmanager
def _short_files(size: int, rng: random.Random) -> Iterator[None]:
    """Limit the length of files in processes that are started meanwhile."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (rng.randrange(1, size), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def scenarios() -> list[Scenario]:
    found = []
    for together in (False, True):
        for whom in ("one", "both"):
            name = f"killed-{whom}-{'collectives' if together else 'alone'}"

            def prepare(job: Job, together: bool = together, whom: str = whom) -> tuple[int, Trial]:
                return _killed(together, whom, job)

            found.append(Scenario("saves", name, prepare))
    return [*found, Scenario("saves", "full-disk", _full), Scenario("saves", "readers", _read)]
