"""The options of offload are checked when they are given, and the error names the option."""

from __future__ import annotations

import os

import pytest

from ckpt_wrap import OffloadOptions, OptionError


@pytest.mark.parametrize("name", ["min_bytes", "keep_last", "max_inflight_bytes", "max_bytes_away"])
@pytest.mark.parametrize("value", [-1, 1.0, "1", True], ids=repr)
def test_a_number_is_an_int_of_at_least_zero(name, value):
    """A bool is none, although Python says it is."""
    with pytest.raises(OptionError, match=f"option '{name}' is {value!r}, but it must be an int"):
        OffloadOptions(**{name: value})


def test_only_limits_can_be_left_to_the_package():
    """None is no size of a tensor, and no number of calls."""
    options = OffloadOptions(max_inflight_bytes=None, max_bytes_away=None)
    assert (options.max_inflight_bytes, options.max_bytes_away) == (None, None)
    for name in ("min_bytes", "keep_last"):
        with pytest.raises(OptionError, match=f"option '{name}' is None"):
            OffloadOptions(**{name: None})


@pytest.mark.parametrize("to", ["cuda", "cuda:1", "cpu:0", "meta"])
def test_another_device_is_refused_with_the_folder_it_may_mean(to):
    """A folder of that name would be made for who mistook the option."""
    with pytest.raises(OptionError, match=rf"Pass '\./{to}' if you mean a folder"):
        OffloadOptions(to=to)


def test_a_folder_named_like_a_device_can_be_meant(tmp_path, monkeypatch):
    """With the dot that the error says."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cuda").mkdir()
    assert OffloadOptions(to="./cuda").to == str(tmp_path / "cuda")


def test_a_path_is_a_folder_wherever_the_process_goes(tmp_path, monkeypatch):
    """It is absolute from then on."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    found = OffloadOptions(to=os.path.join(".", "folder"))
    assert found.folder == tmp_path / "folder"
    assert OffloadOptions(to=tmp_path / "folder") == found


def test_who_makes_the_folder_is_no_difference_once_it_is_there(tmp_path):
    """Modules that share one have equal options, and so one schedule."""
    makes, uses = (
        OffloadOptions(to=tmp_path, create=True),
        OffloadOptions(to=tmp_path),
    )
    assert makes == uses
