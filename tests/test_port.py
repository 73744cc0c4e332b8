# SPDX-License-Identifier: Apache-2.0
"""The pin moves, or a patch goes: every patch is placed anew, or none is written."""

import hashlib
import shutil

import pytest
from conftest import LAYER, REGISTRY, SHADOWED, TEST, snapshot
from kvpatch import cli_apply, drift, export, transact, verify
from kvpatch.errors import PatchSetError
from kvpatch.mailpatch import HunkError, apply_file

GATE, HOOK = "layer-gate.patch", "layer-hook.patch"


class Work:
    """A tiny project, and releases of its upstream to move the pin to."""

    def __init__(self, tiny, folder):
        self.tiny, self.root, self.folder = tiny, tiny.root, folder
        self.version = "1.2.2"

    def release(self, version, **edits):
        """Move the pin to a release: the last one with `{path: (old, new)}` edits."""
        for path, (old, new) in edits.pop("edits", {}).items():
            assert self.tiny.stock[path].count(old) == 1, old
            self.tiny.stock[path] = self.tiny.stock[path].replace(old, new)
        self.version = version
        pin = (self.root / "UPSTREAM.toml").read_text()
        shadow = pin.split('"vllm/slow.py" = "')[1].split('"')[0]
        self.tiny.release(version, shadow)

    def run(self, command, *args):
        words = ["--project", str(self.root), "--sdist", str(self.tiny.sdist), *args]
        return command.main(words)

    def port(self):
        return self.run(export, "--port")

    def tree(self):
        """Unpack the pinned release and apply to it."""
        where = self.folder / f"tree-{len(list(self.folder.iterdir()))}"
        where.mkdir()
        self.tiny.tree(where)
        (where / "PKG-INFO").write_text(f"Name: vllm\nVersion: {self.version}\n")
        self.run(cli_apply, str(where))
        return where

    def patches(self):
        return snapshot(self.root / "patches")

    def after(self, patch, path=LAYER):
        return self.root / "build/port" / patch / "after" / path


@pytest.fixture
def work(tiny, tmp_path):
    tiny.complete()
    made = Work(tiny, tmp_path)
    made.release("1.2.3")
    made.run(export, "--rewrite")
    return made


def holds(work):
    """Everything about the set holds on the pinned release, exactly as written."""
    assert work.run(verify) == 0
    before = work.patches()
    assert work.port() == 0 and work.patches() == before
    assert not (work.root / "build/port").exists()
    assert not (work.root / transact.STATE_DIR).exists()
    return work.tree()


def test_export_points_here_when_the_pin_moved(work):
    tree = work.folder / "unpacked"
    tree.mkdir()
    for edit in ({LAYER: ("line 1\n", "line 1\nnew\n")}, {REGISTRY: ("B8", "B9")}):
        work.release("1.2.4", edits=edit)
        work.tiny.tree(tree)
        (tree / "PKG-INFO").write_text("Name: vllm\nVersion: 1.2.4\n")
        for args in ([str(tree)], ["--rewrite"]):
            with pytest.raises(PatchSetError, match="export.sh --port"):
                work.run(export, *args)


def test_export_points_here_when_a_patched_file_is_gone(work):
    del work.tiny.stock[TEST]
    work.release("1.2.4")
    with pytest.raises(
        PatchSetError, match=f"has no {TEST}\n(.*\n)*.*export.sh --port"
    ):
        work.run(export, "--rewrite")


def test_a_move_with_an_offset(work, capsys):
    edits = {LAYER: ("line 1\n", "line 1\nnew\nnew\n"), REGISTRY: ("B8", "B9")}
    work.release("1.2.4", edits=edits)
    with pytest.raises(PatchSetError):
        work.tree()
    gate = (work.root / "patches" / GATE).read_text()
    capsys.readouterr()
    assert work.port() == 0
    said = capsys.readouterr().out
    assert f"offset            {GATE}: {LAYER}" in said and "line 3 -> 5" in said
    assert f"fits              registry-add.patch: {REGISTRY}" in said
    assert f"clean             {HOOK}: {TEST}" in said
    assert "@@ -3,7 +3,7 @@" in gate
    assert "@@ -5,7 +5,7 @@" in (work.root / "patches" / GATE).read_text()
    tree = holds(work)
    text = work.tiny.patched_layer.replace("line 1\n", "line 1\nnew\nnew\n")
    assert (tree / LAYER).read_text() == text
    assert "    FAST = " in (tree / REGISTRY).read_text()


def test_a_file_that_changed_elsewhere_is_not_as_it_is(work, capsys, tmp_path):
    """The hunks' lines stand where they stood; only the file's id is another."""
    other = tmp_path / "other"
    other.mkdir()
    work.tiny.tree(other)
    (other / REGISTRY).write_text(work.tiny.stock[REGISTRY] + "# the end\n")
    assert work.run(drift, "--to", str(other)) == 1
    said = capsys.readouterr().out
    assert "applies as it is" not in said and "export.sh --port" in said
    work.release("1.2.4", edits={REGISTRY: ('B8 = "m.b8"\n', 'B8 = "m.b8"\n# end\n')})
    work.port()
    assert "# end" in (holds(work) / REGISTRY).read_text()
    capsys.readouterr()
    (other / REGISTRY).write_text(work.tiny.stock[REGISTRY])
    assert work.run(drift, "--to", str(other)) == 0
    assert "applies as it is" in capsys.readouterr().out


def test_a_conflict_writes_no_patch_and_a_resolved_one_is_taken(work, capsys):
    edits = {LAYER: ("line 5\nline 6\n", "line 5\nline six\n"), REGISTRY: ("B8", "B9")}
    work.release("1.2.4", edits=edits)
    before = work.patches()
    capsys.readouterr()
    with pytest.raises(PatchSetError, match=f"unchanged\n.*{GATE}: {LAYER}: CONFLICT"):
        work.port()
    said = capsys.readouterr().out
    assert "wanted: line 7: 'line 6\\n'" in said
    assert "found:  line 7: 'line six\\n'" in said
    assert f"waits             {HOOK}: {LAYER}" in said
    assert work.patches() == before
    after = work.after(GATE)
    assert b"line 30\n" not in after.read_bytes()  # the hunk that fits
    with pytest.raises(PatchSetError, match="unchanged"):
        work.port()
    assert "holds a conflict marker" in capsys.readouterr().out
    assert work.patches() == before
    mine = (
        work.tiny.stock[LAYER].replace("line 5\n", "line V\n").replace("line 30\n", "")
    )
    after.write_text(mine)
    assert work.port() == 0
    assert f"resolved          {GATE}: {LAYER}" in capsys.readouterr().out
    assert "+line V" in (work.root / "patches" / GATE).read_text()
    tree = holds(work)
    assert (tree / LAYER).read_text() == mine.replace("line 20\n", "line 20\nhook()\n")


def test_a_merge_over_other_lines_must_be_looked_at(work):
    """A context line differs: git can merge, but the file still asks for a person."""
    work.release("1.2.4", edits={LAYER: ("line 2\n", "line two\n")})
    with pytest.raises(PatchSetError):
        work.port()
    lines = work.after(GATE).read_text().splitlines(True)
    marks = [line for line in lines if line[:8] in ("<<<<<<< ", ">>>>>>> ")]
    assert len(marks) == 2 and f"{GATE}, hunk 1: check the merge" in marks[0]
    work.after(GATE).write_text("".join(li for li in lines if li not in marks))
    work.port()
    want = work.tiny.patched_layer.replace("line 2\n", "line two\n")
    assert (holds(work) / LAYER).read_text() == want


def test_a_conflict_resolved_for_another_state_is_not_taken(work, capsys):
    work.release("1.2.4", edits={LAYER: ("line 6\n", "line six\n")})
    with pytest.raises(PatchSetError):
        work.port()
    work.after(GATE).write_text("mine\n")
    work.release("1.2.5", edits={LAYER: ("line 39\n", "line 39\nend\n")})
    before = work.patches()
    with pytest.raises(PatchSetError):
        work.port()
    assert "was made for another state" in capsys.readouterr().out
    assert work.patches() == before and work.after(GATE).read_text() == "mine\n"


def test_a_resolution_that_leaves_no_change(work):
    work.release("1.2.4", edits={LAYER: ("line 6\n", "line six\n")})
    with pytest.raises(PatchSetError):
        work.port()
    work.after(GATE).write_text(work.tiny.stock[LAYER])
    with pytest.raises(PatchSetError, match=f"{GATE}: no change is left, so drop it"):
        work.port()


def test_upstream_took_one_and_removed_another(work, capsys):
    new = 'FAST = "vllm.fast.backend.Fast"\n    B4 ='
    work.release("1.2.4", edits={REGISTRY: ("B4 =", new)})
    with pytest.raises(PatchSetError, match="registry-add.*already upstream"):
        work.port()
    del work.tiny.stock[TEST]
    work.release("1.2.5")
    before = work.patches()
    with pytest.raises(PatchSetError, match=f"{HOOK}: {TEST}: FILE GONE"):
        work.port()
    assert work.patches() == before
    # What it says to do: one patch dropped, one file's part taken out by hand.
    folder = work.root / "patches"
    (folder / "registry-add.patch").unlink()
    series = (folder / "series").read_text().replace("registry-add.patch\n", "")
    (folder / "series").write_text(series)
    head, *parts = (folder / HOOK).read_text().split("diff --git ")
    kept = [part for part in parts if TEST not in part]
    (folder / HOOK).write_text("diff --git ".join([head, *kept]))
    assert work.port() == 0
    assert [p.name for p in work.tiny.load().patches] == [GATE, HOOK]
    assert TEST not in work.tiny.load().edits


def test_a_patch_in_the_middle_of_a_chain_is_dropped(work):
    """Three patches edit one file; the second one goes."""
    layer = work.tiny.patched_layer
    last = layer.replace("line 35\n", "line 35\nlast()\n")
    work.tiny.write_patch("layer-last.patch", {LAYER: (layer, last)})
    work.run(export, "--rewrite")
    holds(work)
    folder = work.root / "patches"
    (folder / HOOK).unlink()
    series = (folder / "series").read_text().replace(f"{HOOK}\n", "")
    (folder / "series").write_text(series)
    for args in ([], ["--rewrite"]):
        with pytest.raises(PatchSetError, match="export.sh --port"):
            work.run(export, *args)
    assert work.port() == 0
    assert (holds(work) / LAYER).read_text() == last.replace("hook()\n", "")


def test_a_patch_edited_by_hand(work):
    file = work.root / "patches" / HOOK
    file.write_text(file.read_text().replace("+hook()", "+hook(1)"))
    with pytest.raises(PatchSetError, match="export.sh --port"):
        work.tree()
    assert work.port() == 0
    assert "hook(1)" in (holds(work) / LAYER).read_text()


def test_a_shadowed_file_that_moved_is_named_with_its_sha(work, capsys):
    work.release("1.2.4", edits={SHADOWED: ("SPEED = 1", "SPEED = 9")})
    capsys.readouterr()
    assert work.port() == 0
    digest = hashlib.sha256(b"SPEED = 9\n").hexdigest()
    said = capsys.readouterr().out
    assert f'"{SHADOWED}" = "{digest}"' in said and "still to do by hand" in said
    assert work.run(verify) == 1
    old = hashlib.sha256(b"SPEED = 1\n").hexdigest()
    pin = work.root / "UPSTREAM.toml"
    pin.write_text(pin.read_text().replace(old, digest))
    holds(work)


def test_the_same_bytes_from_the_same_release(work, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(work.root / "patches", copy)
    work.release("1.2.4", edits={LAYER: ("line 1\n", "line 1\nnew\n")})
    work.port()
    once = {path: entry[0] for path, entry in work.patches().items()}
    shutil.rmtree(work.root / "patches")
    shutil.copytree(copy, work.root / "patches")
    work.port()
    assert {path: entry[0] for path, entry in work.patches().items()} == once


@pytest.mark.parametrize("killed", [False, True])
def test_an_interrupted_run_leaves_no_half(work, monkeypatch, capsys, killed):
    edits = {LAYER: ("line 1\n", "line 1\nnew\n"), REGISTRY: ("B8", "B9")}
    work.release("1.2.4", edits=edits)
    before = work.patches()
    moved = []

    def stop(root, staged, change):
        if moved:
            raise KeyboardInterrupt
        moved.append(change.path)
        move(root, staged, change)

    move = transact._move
    with monkeypatch.context() as patched:
        patched.setattr(transact, "_move", stop)
        if killed:  # nothing runs after a kill
            patched.setattr(transact, "repair", lambda root: [])
        with pytest.raises(KeyboardInterrupt):
            work.port()
    if killed:
        assert moved and work.patches() != before
        capsys.readouterr()
        assert work.port() == 0
        assert "put 1 file(s) back" in capsys.readouterr().out
    else:
        assert moved and work.patches() == before
        assert work.port() == 0
    holds(work)


def test_port_takes_no_tree(work, capsys):
    with pytest.raises(SystemExit):
        work.run(export, "--port", str(work.folder))
    assert "it reads no tree" in capsys.readouterr().err


def test_lines_that_stand_twice_ask_a_person(work, capsys):
    """Upstream put a copy before them: the nearest place is the wrong one."""
    same = "".join(f"line {i}\n" for i in range(2, 9))
    work.release("1.2.4", edits={LAYER: ("line 0\n", f"line 0\n{same}")})
    before = work.patches()
    capsys.readouterr()
    with pytest.raises(PatchSetError):
        work.port()
    said = capsys.readouterr().out
    assert "hunk 1: its lines stand more than once: 2, 10" in said
    assert work.patches() == before
    after = work.after(GATE).read_text()
    assert after.index(f"<<<<<<< {GATE}, hunk 1") < after.index("line five\n")
    assert f">>>>>>> {GATE}, hunk 1\n" in after and "line 30\n" not in after
    first, middle, rest = work.tiny.stock[LAYER].partition("\nline 1\n")
    rest = rest.replace("line 5\n", "line five\n").replace("line 30\n", "")
    work.after(GATE).write_text(first + middle + rest)
    work.port()
    text = (holds(work) / LAYER).read_text()
    assert text.index("line 5\n") < text.index("line 1\n") < text.index("line five\n")


def test_apply_still_wants_the_exact_place(work):
    work.release("1.2.4", edits={LAYER: ("line 1\n", "line 1\nnew\n")})
    part = work.tiny.load().patches[1].files[0]
    with pytest.raises(HunkError):
        apply_file(work.tiny.stock[LAYER].encode(), part, GATE)
    with pytest.raises(PatchSetError, match="scripts/export.sh --port"):
        work.tree()
