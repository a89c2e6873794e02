"""What a module is called, and that it stays called so."""

from __future__ import annotations

from torch import nn

from mod_tracker import ModTracker


def test_name_given_once_stays(mlp, x):
    """A part called before its root keeps the name of that call."""
    tracker, names = ModTracker(), []
    tracker.subscribe(pre_forward=lambda call, *_: names.append((call.name, call.called_as)))
    with tracker:
        mlp.a(x)
        mlp(x)
    assert names == [
        ("Linear", "Linear"),
        ("MLP", "MLP"),
        ("Linear", "MLP.a"),
        ("MLP.b", "MLP.b"),
    ]


def test_named_root_names_its_parts_before_they_are_called(mlp, x):
    """With the root given, a part called first has its full name from the start."""
    tracker, names = ModTracker(mlp), []
    tracker.subscribe(pre_forward=lambda call, *_: names.append(call.name))
    with tracker:
        mlp.a(x)
        mlp(x)
    assert names == ["MLP.a", "MLP", "MLP.a", "MLP.b"]


def test_roots_of_one_class_have_different_labels(x):
    """The second root of a class gets a number."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    with ModTracker() as tracker:
        second(first(x))
    assert [tracker.get_known_fqn(m) for m in (first, second)] == ["Linear", "Linear#2"]


def test_module_added_after_the_first_call_gets_its_path(mlp, x):
    """A late module is named by its place, not by its class."""
    with ModTracker() as tracker:
        mlp(x)
        mlp.c = nn.Linear(4, 4)
        mlp.forward = lambda x: mlp.c(mlp.b(mlp.a(x)))
        mlp(x)
    assert tracker.get_known_fqn(mlp.c) == "MLP.c"


def test_moved_module_keeps_its_name(x):
    """Moving a module to another root does not rewrite history."""
    old = nn.Sequential(nn.Linear(4, 4))
    with ModTracker() as tracker:
        old(x)
        new = nn.Sequential(nn.ReLU(), old[0])
        new(x)
    assert tracker.get_known_fqn(old[0]) == "Sequential.0"


def test_name_is_root_label_and_state_dict_prefix(x):
    """Without the label, a name is the prefix of the module's keys in the state_dict."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))
    with ModTracker() as tracker:
        model(x)
    names = [tracker.get_known_fqn(m) for m in (model[0], model[1][0])]
    keys = {key.rpartition(".")[0] for key in model.state_dict()}
    assert {name.partition(".")[2] for name in names} == keys


def test_modules_outside_the_tree_have_distinct_names(x):
    """Modules in a plain list are roots of their own, and told apart."""

    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = [nn.Linear(4, 4), nn.Linear(4, 4)]

        def forward(self, x):
            return self.parts[1](self.parts[0](x))

    model = Hidden()
    with ModTracker() as tracker:
        model(x)
    assert [tracker.get_known_fqn(m) for m in model.parts] == ["Linear", "Linear#2"]


class Square(nn.Module):
    def forward(self, x):
        return x * x


def test_deleted_module_keeps_its_name(x, log_ops):
    """The hook gets None for a dead module, but the stack still has its name."""
    tracker, hooks, names = ModTracker(), [], []
    tracker.register_user_hooks(pre_bw_hook=lambda m, _: hooks.append(m))
    tracker.subscribe(pre_backward=lambda call, _: names.append((call.name, call.module)))
    with tracker:
        model = Square()
        loss = model(x).sum()
        del model
    entries = log_ops(tracker, loss.backward)
    assert {stack for _, _, stack in entries} == {("Square",)}
    assert (hooks, names) == ([None], [("Square", None)])
