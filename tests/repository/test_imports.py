"""Importing a distribution does no work: no thread, no device, no function of torch replaced."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PACKAGES = ("ckpt_wrap", "flat_param", "mod_tracker", "sac_policies", "torchparts_conformance")

CHECK = '''
import os, sys, threading
import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("fake")  # an accelerator: autograd starts threads for it

def functions():
    """Return every function and class attribute in the modules of torch that are loaded."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "torch" or module is None:
            continue
        for key, value in list(vars(module).items()):
            if callable(value):
                found[name, key] = value
            if isinstance(value, type) and value.__module__.partition(".")[0] == "torch":
                found |= {(name, key, own): each for own, each in vars(value).items()}
    return found

def child_can_train():
    """Whether a forked child runs a backward; it cannot if the parent has autograd threads."""
    child = os.fork()
    if child == 0:
        try:
            torch.ones(2, requires_grad=True).sum().backward()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0

before = functions()
{action}
after = functions()
replaced = [".".join(name) for name, value in before.items() if after.get(name) is not value]
print("replaced", replaced)
print("threads", [thread.name for thread in threading.enumerate()][1:])
print("devices", torch.cuda.is_initialized(), torch.xpu.is_initialized())
print("child", child_can_train())
'''

QUIET = ["replaced []", "threads []", "devices False False", "child True"]


def after(action: str) -> list[str]:
    """Return what a fresh interpreter finds after an action."""
    code = CHECK.replace("{action}", action)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")


@needs_fork
@pytest.mark.parametrize("package", PACKAGES)
def test_import_does_no_work(package: str) -> None:
    """A child of a program that imported the package may train."""
    assert after(f"import {package}") == QUIET


@needs_fork
@pytest.mark.parametrize(
    ("action", "found"),
    [
        ("torch.ones(2, requires_grad=True).sum().backward()", "child False"),
        pytest.param(
            *("torch.nn.Module.__call__ = lambda *_: None", "torch.nn.Module.__call__"),
            marks=pytest.mark.nightly,
        ),
        ("threading.Thread(target=threading.Event().wait, daemon=True).start()", "Thread-1"),
    ],
)
def test_work_would_be_found(action: str, found: str) -> None:
    """A backward, a patch and a thread are each seen."""
    lines = after(action)
    assert lines != QUIET
    assert found in "\n".join(lines)
