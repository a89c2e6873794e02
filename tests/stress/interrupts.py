"""Ctrl-C at every place of a scene, followed by a normal step that must equal plain's.

Every instruction at which Ctrl-C can arrive is tried at its first occurrence, and then at further
ones.

Places are in the part's files, in torch's module calls, and in the models here. After each
interrupt the scene checks that values and gradients are bit-identical to plain's, and that nothing
in the process has changed.
"""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from stress import left_behind
from stress.places import Interrupt
from stress.ranks import Group, join
from stress.trials import Job, Scenario, Trial

HERE = Path(__file__).parent
_MODELS = (str(HERE / "models.py"), str(Path(nn.modules.module.__file__)))


@dataclass(frozen=True)
class Scene:
    """A function to interrupt, and a check.

    Attributes:
        act: the function to interrupt; may be called again.
        wrong: runs a normal step and returns what is wrong, or nothing.
        settle: called before each `act`, not interrupted.
    """

    act: Callable[[], object]
    wrong: Callable[[], str]
    settle: Callable[[], object] = lambda: None


def scenario(
    name: str,
    package: str,
    make: Callable[[Path], Scene],
    *,
    ranks: int = 0,
    alone: bool = False,
) -> Scenario:
    """Make the scenario of one scene: its numbers are places.

    Args:
        name: of the scenario.
        package: the part's import name.
        make: builds the scene; gets a folder.
        ranks: number of processes in the group; 0 for no group.
        alone: whether only one rank is interrupted.
    """

    def prepare(job: Job) -> tuple[int, Trial]:
        torch.set_num_threads(1)
        module = importlib.import_module(package)
        watched = (str(Path(str(module.__file__)).parent), *_MODELS)
        group = join(job.folder, job.rank, ranks) if ranks else None
        scene = make(job.folder)
        for _ in range(2):  # lazy initialization happens here
            interrupt = _count(scene, watched)
        places, early = interrupt.seen, {at: at for at in interrupt.firsts.values()}
        if group is not None:
            told = [int(each) for each in group.exchange("places", str(places))]
            places = min(told) * (ranks if alone else 1)
            early = _same_on_all(group, interrupt.firsts)
        if alone:
            early = {(at - 1) * ranks + rank: at for at in early for rank in range(ranks)}
        job.early = frozenset(early)
        return places, functools.partial(_interrupted, scene, watched, group, alone, early)

    return Scenario("interrupts", name, prepare, ranks=max(ranks, 1), first=1)


def _same_on_all(group: Group, firsts: dict[str, int]) -> dict[int, int]:
    """Return rank 0's first place of each instruction, and the same place on this rank."""
    told = [json.loads(word) for word in group.exchange("firsts", json.dumps(firsts))]
    common = set.intersection(*map(set, told))
    return {told[0][name]: firsts[name] for name in common}


def _count(scene: Scene, watched: tuple[str, ...]) -> Interrupt:
    scene.settle()
    with Interrupt(watched) as interrupt:
        scene.act()
    if why := scene.wrong():
        raise AssertionError(f"without an interrupt: {why}")
    return interrupt


def _interrupted(
    scene: Scene,
    watched: tuple[str, ...],
    group: Group | None,
    alone: bool,
    early: dict[int, int],
    number: int,
) -> str | None:
    scene.settle()
    before, why, at = left_behind.state(), "", early.get(number, number)
    if alone and group is not None:
        victim, at = number % group.world, number // group.world + 1
        at = at if victim == group.rank else 0
    interrupt = Interrupt(watched, at)
    try:
        with interrupt:
            scene.act()
    except KeyboardInterrupt:
        pass
    except Exception as error:
        heard = alone and not interrupt.where and isinstance(error, (RuntimeError, ValueError))
        if not heard and not _comes_from_interrupt(error):
            why = f"became {type(error).__name__}: {error}"
    where = interrupt.where
    if group is not None:
        places = group.exchange(f"place-{number}", interrupt.where)
        where = next(filter(None, places), "")
        if not alone and len(set(places)) > 1:
            return None
    if not where and not why:
        return None
    why = why or _wrong(scene)
    why = why or left_behind.changes(before, left_behind.state())
    return f"{why} (after an interrupt at {where})" if why else ""


def _wrong(scene: Scene) -> str:
    try:
        return scene.wrong()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _comes_from_interrupt(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        hidden = error.__suppress_context__
        error = error.__cause__ or (None if hidden else error.__context__)
    return False
