# SPDX-License-Identifier: Apache-2.0
"""A backend's name must resolve: by reading the source, and by importing it."""

import pytest
from conftest import BACKEND, REGISTRY
from kvpatch import apply, probe
from kvpatch.errors import PatchSetError
from kvpatch.target import open_tree

VALUE = "vllm.fast.backend.Fast"


@pytest.fixture
def patched(tiny, tmp_path):
    tree = tiny.tree(tmp_path / "t")
    apply.apply(open_tree(tree, tiny.load().pin), tiny.load())
    return tree


def test_both_ways_give_the_class_path(tiny, patched):
    entry = tiny.load().pin.registry[0]
    assert probe.probe_source(patched, entry) == VALUE
    assert probe.probe_import(patched, entry) == VALUE


@pytest.mark.parametrize(
    "old, new, says",
    [
        ("FAST", "SLOW", "doesn't resolve"),
        (VALUE, "vllm.other.Fast", "doesn't resolve"),
        (VALUE, "vllm.fast.backend.Quick", "isn't there"),
    ],
)
def test_reading_notices(tiny, patched, old, new, says):
    file = patched / REGISTRY
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(PatchSetError, match=says):
        probe.probe_source(patched, tiny.load().pin.registry[0])


def test_reading_notices_a_missing_module(tiny, patched):
    (patched / BACKEND).unlink()
    with pytest.raises(PatchSetError, match="isn't there"):
        probe.probe_source(patched, tiny.load().pin.registry[0])


def test_importing_notices_a_wrong_value_and_an_error(tiny, patched):
    file, entry = patched / REGISTRY, tiny.load().pin.registry[0]
    text = file.read_text()
    file.write_text(text + "\nraise RuntimeError('broken')\n")
    with pytest.raises(PatchSetError, match="broken"):
        probe.probe_import(patched, entry)
    file.write_text(text.replace(VALUE, "vllm.other.Fast"))
    with pytest.raises(PatchSetError, match="vllm.other.Fast"):
        probe.probe_import(patched, entry)


def test_a_failed_import_takes_the_patches_back(tiny, tmp_path, monkeypatch):
    tree = tiny.tree(tmp_path / "t")
    (tree / "vllm/__init__.py").write_text("raise RuntimeError('broken')\n")
    monkeypatch.setattr(probe, "importable", lambda root: True)
    with pytest.raises(PatchSetError, match="broken"):
        apply.apply(open_tree(tree, tiny.load().pin), tiny.load())
    assert (tree / REGISTRY).read_text() == tiny.stock[REGISTRY]
    assert not (tree / BACKEND).exists()
