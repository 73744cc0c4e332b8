# SPDX-License-Identifier: Apache-2.0
"""Edits of a patched tree go back to the patches and the overlay."""

import subprocess

import pytest
from conftest import BACKEND, LAYER, REGISTRY, SHADOWED, git, snapshot
from kvpatch import cli_apply, export
from kvpatch.errors import PatchSetError
from kvpatch.render import rerender

PKG_INFO = "Name: vllm\nVersion: 1.2.3\n"
EXTRA = "vllm/other.py"


@pytest.fixture
def work(tiny, tmp_path):
    """A project with its source release as a file, and a patched tree of it."""
    tiny.stock[EXTRA] = "".join(f"other {i}\n" for i in range(20))
    tiny.release()
    tree = tiny.tree(tmp_path / "tree")
    tiny.where = tree
    bring_into_form(tiny)
    cli_apply.main([str(tree), "--project", str(tiny.root)])
    return tiny


def run(tiny, *args):
    words = [str(tiny.where), "--project", str(tiny.root), "--sdist", str(tiny.sdist)]
    return export.main([*words, *args])


def bring_into_form(tiny):
    words = ["--rewrite", "--project", str(tiny.root), "--sdist", str(tiny.sdist)]
    export.main(words)


def edit(tiny, path, *pairs):
    text = (tiny.where / path).read_text()
    for old, new in pairs:
        assert text.count(old) == 1
        text = text.replace(old, new)
    (tiny.where / path).write_text(text)


def test_nothing_to_write_leaves_every_byte(work, capsys):
    before = snapshot(work.root)
    assert run(work) == 0
    assert "nothing to write" in capsys.readouterr().out
    assert snapshot(work.root) == before


def test_rewrite_is_stable(work):
    stock = export.read_stock(work.load(), work.sdist)
    for patch in work.load().patches:
        kept, made = rerender(work.load(), patch, stock)
        assert kept == made


def test_an_edit_goes_to_the_last_patch_and_comes_back_by_apply(work, tmp_path):
    edit(work, LAYER, ("hook()\n", "hook(1)\n"))
    edit(work, BACKEND, ("pass", "speed = 3"))
    assert run(work) == 0
    assert b"hook(1)" in (work.root / "patches/layer-hook.patch").read_bytes()
    assert b"hook(1)" not in (work.root / "patches/layer-gate.patch").read_bytes()
    other = work.tree(tmp_path / "other")
    cli_apply.main([str(other), "--project", str(work.root)])
    for path in (LAYER, BACKEND, REGISTRY):
        assert (other / path).read_bytes() == (work.where / path).read_bytes()
    before = snapshot(work.root)
    run(work)
    assert snapshot(work.root) == before


def test_an_edit_goes_through_later_patches(work, tmp_path):
    edit(work, LAYER, ("line five\n", "line 5.5\n"), ("line 39\n", "line 39\nend\n"))
    run(work, "--patch", "layer-gate.patch")
    gate = (work.root / "patches/layer-gate.patch").read_text()
    assert "line 5.5" in gate and "+end" in gate
    other = work.tree(tmp_path / "other")
    cli_apply.main([str(other), "--project", str(work.root)])
    assert (other / LAYER).read_bytes() == (work.where / LAYER).read_bytes()


def test_an_edit_that_overlaps_a_later_patch_is_refused(work):
    edit(work, LAYER, ("hook()\n", "hook(1)\n"))
    before = snapshot(work.root)
    with pytest.raises(PatchSetError, match="overlaps with layer-hook.patch"):
        run(work, "--patch", "layer-gate.patch")
    assert snapshot(work.root) == before


def test_a_file_without_a_patch_needs_a_name(work):
    edit(work, EXTRA, ("other 3\n", "other three\n"))
    with pytest.raises(PatchSetError, match="no patch touches"):
        run(work)
    run(work, "--new", "other-count.patch", "--subject", "other: count")
    assert work.load().patches[-1].name == "other-count.patch"
    assert work.load().patches[-1].subject == "other: count"
    edit(work, EXTRA, ("other 9\n", "other nine\n"))
    run(work)
    assert b"other nine" in (work.root / "patches/other-count.patch").read_bytes()


def test_new_and_removed_overlay_files(work, capsys):
    (work.where / "vllm/fast/more.py").write_text("x = 1\n")
    (work.where / "elsewhere.py").write_text("x = 1\n")
    (work.where / "vllm/fast/__init__.py").unlink()
    edit(work, SHADOWED, ("SPEED = 2", "SPEED = 4"))
    run(work)
    overlay = work.root / "vllm_overlay/vllm"
    assert (overlay / "fast/more.py").exists()
    assert not (overlay / "fast/__init__.py").exists()
    assert (overlay / "slow.py").read_text() == "SPEED = 4\n"
    assert "left alone, a new file: elsewhere.py" in capsys.readouterr().out


def test_edits_on_both_sides_are_refused(work):
    edit(work, BACKEND, ("pass", "speed = 3"))
    work.overlay(BACKEND, "class Fast:\n    speed = 4\n")
    with pytest.raises(PatchSetError, match="in the tree and in this project"):
        run(work)


def test_an_overlay_edited_here_is_no_edit_of_the_tree(work):
    work.overlay(BACKEND, "class Fast:\n    speed = 4\n")
    run(work)
    assert "speed = 4" in (work.root / "vllm_overlay" / BACKEND).read_text()
    assert "speed = 4" in (work.where / BACKEND).read_text()


def test_one_commit_holds_one_half(work):
    git(work.root, "init", "-q")
    git(work.root, "config", "user.name", "dev")
    git(work.root, "config", "user.email", "dev@example.com")
    git(work.root, "add", "-A")
    git(work.root, "commit", "-qm", "start")
    edit(work, LAYER, ("hook()\n", "hook(1)\n"))
    edit(work, BACKEND, ("pass", "speed = 3"))
    with pytest.raises(PatchSetError, match="one commit can't hold"):
        run(work, "--commit", "Both")
    assert not subprocess.run(
        ["git", "status", "--porcelain"], cwd=work.root, capture_output=True
    ).stdout
    run(work, "--only", "overlay", "--commit", "Speed")
    log = subprocess.run(
        ["git", "show", "--name-only", "--format=%s"], cwd=work.root,
        capture_output=True, text=True,
    ).stdout.split()  # fmt: skip
    assert log == ["Speed", f"vllm_overlay/{BACKEND}"]
