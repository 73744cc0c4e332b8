# SPDX-License-Identifier: Apache-2.0
"""apply, check, reverse and status on tiny trees of every kind."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from conftest import BACKEND, LAYER, REGISTRY, SHADOWED, TEST, git, snapshot
from kvpatch import apply as front
from kvpatch import cli_apply, transact
from kvpatch.errors import PatchSetError
from kvpatch.target import open_tree

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


def run(tiny, tree, *args):
    return cli_apply.main([str(tree), "--project", str(tiny.root), *args])


def fails(tiny, tree, *args):
    """Run, expect an error that leaves the tree as it was, and return its text."""
    before = snapshot(tree)
    with pytest.raises(PatchSetError) as caught:
        run(tiny, tree, *args)
    assert snapshot(tree) == before
    return str(caught.value)


@pytest.fixture(params=["sdist", "installed", "clone", "with space"])
def tree(request, tiny, tmp_path):
    name, kind = "tree", request.param
    if kind == "with space":
        name, kind = "a tree's folder", "sdist"
    return tiny.tree(tmp_path / name, kind)


def test_apply_twice_and_reverse_byte_for_byte(tiny, tree, capsys):
    stock = snapshot(tree)
    assert run(tiny, tree, "--check") == 0
    assert snapshot(tree) == stock
    assert run(tiny, tree) == 0
    assert (tree / LAYER).read_text() == tiny.patched_layer
    assert "FAST" in (tree / REGISTRY).read_text()
    assert (tree / BACKEND).is_file()
    assert (tree / SHADOWED).read_text() == "SPEED = 2\n"
    if (tree / "tests").exists():
        assert "test_hook" in (tree / TEST).read_text()
    patched = snapshot(tree)
    capsys.readouterr()
    assert run(tiny, tree) == 0
    assert "nothing changed" in capsys.readouterr().out
    assert snapshot(tree) == patched
    assert run(tiny, tree, "--reverse") == 0
    assert snapshot(tree) == stock
    assert run(tiny, tree, "--reverse") == 0
    assert "nothing changed" in capsys.readouterr().out
    assert snapshot(tree) == stock


def test_a_clone_stays_clean_but_for_the_patches(tiny, tmp_path):
    tree = tiny.tree(tmp_path / "t", "clone")
    run(tiny, tree)
    run(tiny, tree, "--reverse")
    ran = subprocess.run(
        ["git", "status", "--porcelain", "--ignored"], cwd=tree, capture_output=True
    )
    assert ran.stdout == b""


def test_bytecode_of_added_folders_goes_with_reverse(tiny, tree):
    stock = snapshot(tree)
    run(tiny, tree)
    cache = tree / "vllm/fast/__pycache__"
    cache.mkdir()
    (cache / "backend.cpython-311.pyc").write_bytes(b"x")
    run(tiny, tree, "--reverse")
    assert snapshot(tree) == stock


def test_another_version(tiny, tmp_path):
    tree = tiny.tree(tmp_path / "t")
    (tree / "PKG-INFO").write_text("Name: vllm\nVersion: 1.2.4\n")
    text = fails(tiny, tree)
    assert "1.2.4" in text and "1.2.3" in text
    (tree / "PKG-INFO").write_text("Name: vllm\nVersion: 1.2.3+cu130\n")
    assert run(tiny, tree) == 0


def test_a_clone_of_another_tag(tiny, tmp_path):
    tree = tiny.tree(tmp_path / "t", "clone")
    git(tree, "commit", "--allow-empty", "-qm", "next")
    git(tree, "tag", "v1.3.0")
    assert "1.3.0 (git tag v1.3.0)" in fails(tiny, tree)


@pytest.mark.parametrize("release", [[], ["-a", "-m", "release"]])
def test_a_candidates_tag_on_the_release_doesnt_hide_it(tiny, tmp_path, release):
    """An annotated tag wins over a lightweight one in `git describe`."""
    tree = tiny.tree(tmp_path / "t", "clone")
    git(tree, "tag", "-d", "v1.2.3")
    git(tree, "tag", *release, "v1.2.3")
    git(tree, "tag", "-a", "-m", "candidate", "v1.2.3rc2")
    found = open_tree(tree, tiny.load().pin)
    assert (found.version, found.evidence) == ("1.2.3", "git tag v1.2.3")
    assert run(tiny, tree) == 0
    git(tree, "commit", "--allow-empty", "-qm", "next")
    assert open_tree(tree, tiny.load().pin).evidence.endswith("+ 1 commits")


def test_not_a_tree(tiny, tmp_path):
    tree = tiny.tree(tmp_path / "t")
    assert "pass its parent" in fails(tiny, tree / "vllm")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "isn't a vllm tree" in fails(tiny, empty)


def test_a_touched_file_that_differs_names_patch_file_and_hunk(tiny, tree):
    text = (tree / LAYER).read_text()
    (tree / LAYER).write_text(text.replace("line 31\n", "line thirty-one\n"))
    for args in ([], ["--check"]):
        said = fails(tiny, tree, *args)
        assert "layer-gate.patch, hunk 2" in said and LAYER in said
        assert "thirty-one" in said


def test_a_touched_file_that_differs_far_from_any_hunk(tiny, tree):
    with open(tree / LAYER, "a") as file:
        file.write("more\n")
    assert "isn't the pinned one" in fails(tiny, tree)


def test_a_file_in_the_way_of_the_overlay(tiny, tree):
    (tree / BACKEND).parent.mkdir()
    (tree / BACKEND).write_text("mine\n")
    assert BACKEND in fails(tiny, tree)


def test_a_shadowed_file_that_moved(tiny, tree):
    (tree / SHADOWED).write_text("SPEED = 3\n")
    said = fails(tiny, tree)
    assert "[shadow]" in said and SHADOWED in said


@pytest.mark.parametrize("done", [[REGISTRY], [LAYER], [BACKEND], [REGISTRY, LAYER]])
def test_half_applied_by_hand_is_refused_and_reverse_helps(tiny, tree, done):
    stock = snapshot(tree)
    other = tree.parent / "other"
    tiny.tree(other)
    run(tiny, other)
    for path in done:
        (tree / path).parent.mkdir(exist_ok=True)
        (tree / path).write_bytes((other / path).read_bytes())
    said = fails(tiny, tree)
    assert "half patched" in said and done[0] in said
    run(tiny, tree, "--reverse")
    assert snapshot(tree) == stock


def test_reverse_without_a_record_takes_replaced_files_from_the_release(
    tiny, tmp_path, monkeypatch
):
    release = tmp_path / "vllm-1.2.3.tar.gz"
    with tarfile.open(release, "w:gz") as tar:
        tar.add(tiny.tree(tmp_path / "stock"), "vllm-1.2.3")
    digest = hashlib.sha256(release.read_bytes()).hexdigest()
    pin = tiny.root / "UPSTREAM.toml"
    pin.write_text(
        pin.read_text().replace('sdist_sha256 = "00"', f'sdist_sha256 = "{digest}"')
    )
    cache = tmp_path / "cache"
    monkeypatch.setenv("KVPATCH_CACHE", str(cache))
    tree = tiny.tree(tmp_path / "tree")
    stock = snapshot(tree)
    run(tiny, tree)
    shutil.rmtree(tree / transact.STATE_DIR)
    said = fails(tiny, tree, "--reverse")
    assert f"{SHADOWED}: its original is not known" in said and "kv.py fetch" in said
    (cache / digest[:16]).mkdir(parents=True)
    shutil.copy(release, cache / digest[:16])
    run(tiny, tree, "--reverse")
    assert snapshot(tree) == stock


def test_only_the_first_of_two_patches_of_a_file(tiny, tree):
    parts = tiny.load().edits[LAYER]
    first = front.look(open_tree(tree, tiny.load().pin), tiny.load())
    stock = next(f.stock for f in first.files if f.path == LAYER)
    from kvpatch.patchset import patched_bytes

    (tree / LAYER).write_bytes(patched_bytes(stock, parts, upto=1))
    said = fails(tiny, tree)
    assert "layer-gate.patch is applied, layer-hook.patch is not" in said


@pytest.fixture
def ordinary_user():
    """Drop root's power to write anywhere, if this runs as root."""
    if os.geteuid() == 0:
        os.seteuid(65534)
        yield
        os.seteuid(0)
    else:
        yield


@pytest.mark.parametrize("locked", [".", "vllm", "tests"])
def test_unwritable_target(tiny, tmp_path, locked, request):
    tree = tiny.tree(tmp_path / "t")
    for path in [tree, *tree.rglob("*"), *tiny.root.rglob("*"), *tree.parents[:3]]:
        path.chmod(path.stat().st_mode | (0o777 if path.is_dir() else 0o666))
    (tree / locked).chmod(0o555)
    request.getfixturevalue("ordinary_user")
    said = fails(tiny, tree)
    assert "can't be written" in said and "nothing was changed" in said


def test_a_disk_error_in_the_middle_is_taken_back(tiny, tree, monkeypatch):
    moved = []
    real = transact._move

    def move(root, staged, change):
        if len(moved) == 3:
            raise OSError(28, "No space left on device", change.path)
        moved.append(change.path)
        real(root, staged, change)

    monkeypatch.setattr(transact, "_move", move)
    assert "No space left" in fails(tiny, tree)
    assert len(moved) == 3


KILL = """
import os, signal, sys
from kvpatch import cli_apply, transact
real, left = transact._move, [int(sys.argv[1])]
def move(root, staged, change):
    if left[0] == 0:
        os.kill(os.getpid(), int(sys.argv[2]))
    left[0] -= 1
    real(root, staged, change)
transact._move = move
sys.exit(cli_apply.main(sys.argv[3:]))
"""


def killed_run(tiny, tree, after, number, *args):
    words = [sys.executable, "-c", KILL, str(after), str(int(number)), str(tree)]
    return subprocess.run(
        [*words, "--project", str(tiny.root), "--no-import", *args],
        env=dict(os.environ, PYTHONPATH=str(SCRIPTS)),
        capture_output=True,
        text=True,
    )


def test_output_that_nobody_reads_is_no_traceback(tiny, tmp_path):
    tree = tiny.tree(tmp_path / "t")
    words = [sys.executable, SCRIPTS / "kv.py", "apply", str(tree), "--no-import"]
    reader, writer = os.pipe()
    os.close(reader)
    ran = subprocess.run(
        [*words, "--project", str(tiny.root), "--status"],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writer)
    assert ran.returncode == 141 and ran.stderr == ""


@pytest.mark.parametrize("after", [0, 2, 5])
def test_a_killed_run_is_repaired_by_the_next(tiny, tmp_path, after, capsys):
    tree = tiny.tree(tmp_path / "t")
    stock = snapshot(tree)
    assert killed_run(tiny, tree, after, signal.SIGKILL).returncode < 0
    assert (tree / transact.STATE_DIR / "journal.json").exists()
    assert run(tiny, tree, "--status") == 1
    assert "interrupted" in capsys.readouterr().out
    assert run(tiny, tree) == 0
    assert "an earlier run was interrupted" in capsys.readouterr().out
    assert (tree / LAYER).read_text() == tiny.patched_layer
    run(tiny, tree, "--reverse")
    assert snapshot(tree) == stock


KILL_LATE = KILL.replace("transact._move = move", "front._write_record = die").replace(
    "def move", "from kvpatch import apply as front\ndef die(*args):\n"
    "    os.kill(os.getpid(), int(sys.argv[2]))\ndef move"
)  # fmt: skip


def test_a_run_killed_before_its_record_is_completed_by_the_next(
    tiny, tmp_path, monkeypatch
):
    tree = tiny.tree(tmp_path / "t")
    (tree / "vllm/__pycache__").mkdir()
    (tree / "vllm/__pycache__/kept.pyc").write_bytes(b"x")
    stock = snapshot(tree)
    monkeypatch.setattr(sys.modules[__name__], "KILL", KILL_LATE)
    assert killed_run(tiny, tree, 0, signal.SIGKILL).returncode < 0
    assert (tree / LAYER).read_text() == tiny.patched_layer
    assert not front.record_path(tree).exists()
    run(tiny, tree)
    assert front.record_path(tree).exists()
    run(tiny, tree, "--reverse")
    assert snapshot(tree) == stock


def test_a_killed_reverse_is_repaired_too(tiny, tmp_path):
    tree = tiny.tree(tmp_path / "t")
    stock = snapshot(tree)
    run(tiny, tree)
    assert killed_run(tiny, tree, 2, signal.SIGKILL, "--reverse").returncode < 0
    run(tiny, tree, "--reverse")
    assert snapshot(tree) == stock


def test_a_terminated_run_takes_itself_back(tiny, tmp_path):
    tree = tiny.tree(tmp_path / "t")
    stock = snapshot(tree)
    assert killed_run(tiny, tree, 3, signal.SIGTERM).returncode != 0
    assert snapshot(tree) == stock


def test_a_failed_postcondition_is_taken_back(tiny, tree):
    tiny.overlay(BACKEND, "class Slow:\n    pass\n")
    assert "isn't there" in fails(tiny, tree)


def test_a_changed_overlay_updates_a_patched_tree(tiny, tree):
    stock = snapshot(tree)
    run(tiny, tree)
    tiny.overlay(BACKEND, "class Fast:\n    speed = 2\n")
    tiny.overlay("vllm/fast/more.py", "")
    (tiny.root / "vllm_overlay/vllm/fast/__init__.py").unlink()
    assert run(tiny, tree) == 0
    assert "speed" in (tree / BACKEND).read_text()
    assert not (tree / "vllm/fast/__init__.py").exists()
    run(tiny, tree, "--reverse")
    assert snapshot(tree) == stock


def test_edits_of_a_patched_tree_are_not_lost(tiny, tree):
    stock = snapshot(tree)
    run(tiny, tree)
    (tree / BACKEND).write_text("class Fast:\n    mine = 1\n")
    (tree / LAYER).write_text("all new\n")
    for args in ([], ["--reverse"]):
        said = fails(tiny, tree, *args)
        assert BACKEND in said and "scripts/export.sh" in said
    run(tiny, tree, "--reverse", "--discard")
    assert snapshot(tree) == stock


def test_status_as_json(tiny, tree, capsys):
    run(tiny, tree)
    capsys.readouterr()
    assert run(tiny, tree, "--status", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["state"] == "patched" and facts["version"].startswith("1.2.3")
    assert [p["name"] for p in facts["applied_patches"]] == [
        "registry-add.patch",
        "layer-gate.patch",
        "layer-hook.patch",
    ]
    assert facts["applied_patch_set"] == facts["patch_set"] == tiny.load().ident
    (tree / LAYER).write_text("edited\n")
    assert run(tiny, tree, "--status") == 1
    assert "half patched or edited" in capsys.readouterr().out


def test_json_without_status_is_refused(tiny, tree, capsys):
    before = snapshot(tree)
    for words in ([], ["--check"], ["--reverse"]):
        with pytest.raises(SystemExit) as caught:
            run(tiny, tree, "--json", *words)
        assert caught.value.code == 2
        assert "--json goes with --status" in capsys.readouterr().err
        assert snapshot(tree) == before


def test_the_columns_of_status_stand_apart(tiny, tree, capsys):
    run(tiny, tree)
    capsys.readouterr()
    run(tiny, tree, "--status")
    rows = [r.split() for r in capsys.readouterr().out.split("\n") if "vllm/" in r]
    digest = hashlib.sha256((tree / BACKEND).read_bytes()).hexdigest()
    assert ["overlay", digest[:16], "patched", BACKEND] in rows
    assert len(rows) == 5 and {row[0] for row in rows} == {"overlay", "patch", "shadow"}


def test_an_edited_file_of_ours_is_called_edited(tiny, tree, capsys):
    run(tiny, tree)
    for path in (BACKEND, LAYER, SHADOWED):
        (tree / path).write_text("mine\n")
    capsys.readouterr()
    assert run(tiny, tree, "--status", "--json") == 1
    why = {
        f["path"]: f["why"]
        for f in json.loads(capsys.readouterr().out)["files"]
        if "why" in f
    }
    assert set(why) == {BACKEND, LAYER, SHADOWED}
    for text in why.values():
        assert "edited since it was applied" in text and "[shadow]" not in text
        assert "scripts/export.sh" in text and "--reverse --discard" in text


def test_a_tree_of_an_older_state_that_patched_less_was_not_reinstalled(
    tiny, tmp_path, capsys
):
    tree = tiny.tree(tmp_path / "t")
    series = tiny.root / "patches/series"
    whole = series.read_text()
    series.write_text("layer-gate.patch\nregistry-add.patch\n")
    hook = tiny.root / "patches/layer-hook.patch"
    hook.rename(tmp_path / hook.name)
    run(tiny, tree)
    (tmp_path / hook.name).rename(hook)
    series.write_text(whole)
    capsys.readouterr()
    assert run(tiny, tree, "--status") == 1
    said = capsys.readouterr().out
    assert f"stock    {TEST}" in said
    assert "patched by another state of this patch set: apply updates it" in said
    assert run(tiny, tree) == 0
    assert "test_hook" in (tree / TEST).read_text()


def test_an_upgrade_underneath_is_noticed_and_cleaned(tiny, tmp_path, capsys):
    tree = tiny.tree(tmp_path / "site", "installed")
    run(tiny, tree)
    # What an installer does: its own files are replaced, ours stay behind.
    for path, text in tiny.stock.items():
        if path.startswith("vllm/"):
            (tree / path).write_text(text + "# new release\n")
    info = (tree / "vllm-1.2.3.dist-info").rename(tree / "vllm-1.3.0.dist-info")
    (info / "METADATA").write_text("Name: vllm\nVersion: 1.3.0\n")
    assert run(tiny, tree, "--status") == 1
    assert "replaced underneath" in capsys.readouterr().out
    assert "1.3.0" in fails(tiny, tree)
    run(tiny, tree, "--reverse")
    assert not (tree / "vllm/fast").exists()
    assert "# new release" in (tree / LAYER).read_text()


def test_a_reinstall_underneath_is_noticed_and_patched_again(tiny, tmp_path, capsys):
    tree = tiny.tree(tmp_path / "site", "installed")
    run(tiny, tree)
    for path in (REGISTRY, LAYER, SHADOWED):
        (tree / path).write_text(tiny.stock[path])
    assert run(tiny, tree, "--status") == 1
    assert "reinstalled underneath" in capsys.readouterr().out
    assert run(tiny, tree) == 0
    assert (tree / LAYER).read_text() == tiny.patched_layer


def test_two_runs_at_once(tiny, tree):
    with transact.tree_lock(tree), pytest.raises(PatchSetError, match="another run"):
        run(tiny, tree)


def test_modes_survive(tiny, tree):
    (tree / LAYER).chmod(0o755)
    run(tiny, tree)
    assert (tree / LAYER).stat().st_mode & 0o777 == 0o755
    run(tiny, tree, "--reverse")
    assert (tree / LAYER).stat().st_mode & 0o777 == 0o755


def test_shared_inodes_are_not_written_through(tiny, tree, tmp_path):
    """Installers may hard-link a package's files to a cache."""
    cached = tmp_path / "cached.py"
    os.link(tree / LAYER, cached)
    run(tiny, tree)
    assert cached.read_text() == tiny.stock[LAYER]


def test_a_patch_edited_by_hand_is_refused(tiny, tree):
    """Its hunks still apply, but the result isn't the blob that it names."""
    patch = tiny.root / "patches/layer-gate.patch"
    patch.write_text(patch.read_text().replace("+line five", "+line 5.0"))
    said = fails(tiny, tree)
    assert "layer-gate.patch gives another file than it says" in said and LAYER in said


def test_a_changed_series_updates_a_patched_tree(tiny, tree):
    stock = snapshot(tree)
    run(tiny, tree)
    (tiny.root / "patches/layer-hook.patch").unlink()
    series = tiny.root / "patches/series"
    series.write_text(series.read_text().replace("layer-hook.patch\n", ""))
    assert run(tiny, tree) == 0
    text = (tree / LAYER).read_text()
    assert "line five" in text and "hook()" not in text
    if (tree / TEST).exists():
        assert (tree / TEST).read_text() == tiny.stock[TEST]
    assert run(tiny, tree, "--status") == 0
    run(tiny, tree, "--reverse")
    assert snapshot(tree) == stock
