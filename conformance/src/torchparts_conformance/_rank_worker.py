"""One process of the pool for cases with several ranks; see `_ranks`."""

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

from torchparts_conformance._failure import sentence
from torchparts_conformance._subject import Subject, freeze_imports
from torchparts_conformance._worker import serve


def main() -> None:
    """Serve jobs until standard input ends."""
    torch.set_num_threads(1)
    subjects: dict[tuple[str, str | None], Subject] = {}
    freeze_imports()
    serve(lambda job, tell: _answer(job, subjects))


def _answer(job: dict[str, Any], subjects: dict[tuple[str, str | None], Subject]) -> dict[str, Any]:
    try:
        key = (job["impl"], job["mutant"])
        value = json.loads(json.dumps(_run(job, subjects.setdefault(key, Subject(*key)))))
        return {"job": job["job"], "value": value}
    except BaseException as error:  # any exception of a rank belongs to the case
        return {
            "job": job["job"],
            "error": sentence(error),
            "trace": traceback.format_exc()[-4000:],
            "failed": isinstance(error, AssertionError),
        }


def _run(job: dict[str, Any], subject: Subject) -> Any:
    sys.path[:] = job["path"]
    dist.init_process_group(
        "gloo",
        init_method=Path(job["store"]).as_uri(),
        rank=job["rank"],
        world_size=job["world_size"],
        timeout=datetime.timedelta(seconds=job["timeout_s"]),
    )
    torch.manual_seed(0)
    try:
        function = _function(job["module"], job["file"], job["function"])
        part = subject.part(job["area"])
        return function(part, job["rank"], job["world_size"], *job["args"])
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        freeze_imports()
        gc.collect()  # process groups of a case end with the objects that refer to them
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()


def _function(module: str, file: str, name: str) -> Any:
    """Import a case's function by module name, or from its file if it is in no package."""
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
