"""One process of the pool that cases with several ranks run in; see `_ranks`."""

from __future__ import annotations

import datetime
import gc
import importlib
import importlib.util
import json
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchparts_conformance._errors import NotProvided, RankError
from torchparts_conformance.subject import _devices, _isolation, _tamper
from torchparts_conformance.subject._subject import Subject
from torchparts_conformance.subject._worker import serve

SEED = 0


def main() -> None:
    """Serve jobs until standard input ends."""
    torch.set_num_threads(1)
    subjects: dict[tuple[str, str | None], Subject] = {}
    look = _tamper.guard()
    _isolation.admit()
    _devices.import_back_ends()
    serve(lambda job: _answer(job, subjects, look), ready={"job": None})


def _answer(
    job: dict[str, Any], subjects: dict[tuple[str, str | None], Subject], look: _tamper.Look
) -> dict[str, Any]:
    try:
        key = (job["impl"], job["mutant"])
        subject = subjects.setdefault(key, Subject(*key))
        value = json.loads(json.dumps(_run(job, subject)))
        if replaced := look():
            raise RankError(f"{replaced[0]} was replaced by the code under test")
        return {"job": job["job"], "value": value}
    except BaseException as error:  # whatever is raised in a rank belongs to the case
        text = f"{type(error).__name__}: {error}"
        kinds = {"failed": AssertionError, "lacks": NotProvided}
        is_of = {word: isinstance(error, kind) for word, kind in kinds.items()}
        trace = traceback.format_exc()[-4000:]
        return {"job": job["job"], "error": text[:2000], **is_of, "trace": trace}


def _run(job: dict[str, Any], subject: Subject) -> Any:
    sys.path[:] = job["path"]
    dist.init_process_group(
        "gloo",
        init_method=Path(job["store"]).as_uri(),
        rank=job["rank"],
        world_size=job["world_size"],
        timeout=datetime.timedelta(seconds=job["timeout_s"]),
    )
    torch.manual_seed(SEED)
    try:
        function = _function(job["module"], job["file"], job["function"])
        part = subject.part(job["area"])
        return function(part, job["rank"], job["world_size"], *job["args"])
    finally:
        _clean_up()


def _clean_up() -> None:
    """Leave the process as the next case expects it."""
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()  # groups that a case made end with what refers to them, threads and all
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def _function(module: str, file: str, name: str) -> Any:
    """Import a case's function by module name, or from its file where it is in no package."""
    if module not in sys.modules:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError:
            specification = importlib.util.spec_from_file_location(module, file)
            if specification is None or specification.loader is None:
                raise
            loaded = importlib.util.module_from_spec(specification)
            sys.modules[module] = loaded
            specification.loader.exec_module(loaded)
    return getattr(sys.modules[module], name)


if __name__ == "__main__":
    main()
