"""What holds for all public names, and what importing them costs."""

import inspect
import subprocess
import sys
from dataclasses import is_dataclass

import torch

import flat_param

MODULES = (flat_param, flat_param.plan, flat_param.handle)


def _value(name):
    """A public name of the package or of one of its submodules."""
    return next(getattr(each, name) for each in MODULES if hasattr(each, name))


def test_every_public_name_is_documented():
    """Classes, their public methods, and functions say what they are."""
    for name in (name for each in MODULES for name in each.__all__):
        value = _value(name)
        assert inspect.getdoc(value), name
        for member, method in vars(value).items() if inspect.isclass(value) else ():
            if inspect.isfunction(method) and not member.startswith("_"):
                assert inspect.getdoc(method), f"{name}.{member}"


def test_public_values_cannot_be_changed() -> None:
    """Plans and layouts are shared by units and ranks."""
    values = [value for each in MODULES for value in map(_value, each.__all__)]
    records = [value for value in values if inspect.isclass(value) and is_dataclass(value)]
    assert flat_param.plan.TrainingPlan in records
    assert [kind for kind in records if not kind.__dataclass_params__.frozen] == []


LOADS = """
import sys, torch
before = set(sys.modules)
import flat_param
print(*sorted(set(sys.modules) - before))
state = torch.load(sys.argv[1], weights_only=True)
print({k: tuple(v.shape) for k, v in state.items()}, "torch.distributed.checkpoint" in sys.modules)
"""


def test_import_loads_the_package_alone_and_a_state_dict_is_read(group_of_one, tmp_path):
    """Over `import torch`, and the standard library; a state with `weights_only=True`.

    DTensor and sympy, which come with torch.distributed.checkpoint, wait for a save.
    """
    torch.save(flat_param.fully_shard(torch.nn.Linear(3, 2)).state_dict(), tmp_path / "state.pt")
    command = [sys.executable, "-c", LOADS, str(tmp_path / "state.pt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    loaded, *said = done.stdout.splitlines()
    known = {"flat_param", *sys.stdlib_module_names}
    assert [name for name in loaded.split() if name.partition(".")[0] not in known] == []
    assert said == ["{'weight': (2, 3), 'bias': (2,)} False"]
