# SPDX-License-Identifier: Apache-2.0
"""Apply the patch set to a tree, reverse it, and tell what is applied."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import probe
from .errors import PatchSetError
from .fetch import cached_member
from .patchset import PatchSet
from .state import (
    OTHER,
    PARTIAL,
    PATCHED,
    STOCK,
    FileState,
    TreeState,
    look,
    record_path,
    refuse_unknown,
    sha256,
)
from .target import INSTALLED, Target, check_version, git
from .transact import (
    STATE_DIR,
    Change,
    interrupted,
    read_or_none,
    remove_empty_dirs,
    repair,
    run_changes,
    tree_lock,
    unwritable,
    write_json,
)


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


@contextlib.contextmanager
def _owned(target: Target) -> Iterator[None]:
    """Hold the tree, repair an interrupted run, and leave no empty state folder."""
    with tree_lock(target.root):
        if interrupted(target.root):
            paths = repair(target.root)
            say(f"an earlier run was interrupted: put {len(paths)} file(s) back")
        try:
            yield
        finally:
            if not record_path(target.root).exists() and not interrupted(target.root):
                shutil.rmtree(target.root / STATE_DIR, ignore_errors=True)


def apply(target: Target, patch_set: PatchSet, with_import: bool = True) -> bool:
    """Bring a tree to the patched state, all or nothing.

    Args:
        target: The tree.
        patch_set: What to apply.
        with_import: Also resolve the backends by importing, where torch is there.

    Returns:
        Whether anything changed.

    Raises:
        PatchSetError: It can't be applied, or a postcondition fails; the tree
            stands as before.

    """
    check_version(target, patch_set.pin)
    state = look(target, patch_set)
    noted = (state.record or {}).get("patch_set")
    if state.is_patched and noted == patch_set.ident and not state.interrupted:
        check_result(target, patch_set)
        say(f"already applied, nothing changed: {target.root}")
        return False
    with _owned(target):
        state = look(target, patch_set)
        refuse_unknown(state)
        _refuse_half(state)
        changes = [
            Change(f.path, f.now, f.want, _executable(patch_set, f.path))
            for f in [*state.files, *state.stale]
            if f.now != f.want
        ]
        _keep_originals(state)
        made = run_changes(target.root, changes)
        try:
            check_result(target, patch_set)
            _check_import(target, patch_set, with_import)
            _write_record(state, patch_set, made)
        except BaseException:
            _take_back(target.root, changes, made)
            raise
    say(
        f"applied {len(patch_set.patches)} patches and {_overlay_count(state)} overlay "
        f"files to {target.root} ({len(changes)} files changed)"
    )
    return True


def check(target: Target, patch_set: PatchSet) -> str:
    """Tell whether `apply` would work, writing nothing.

    Returns:
        "applied" or "applicable".

    Raises:
        PatchSetError: It would fail.

    """
    check_version(target, patch_set.pin)
    state = look(target, patch_set)
    if state.interrupted:
        say("an earlier run was interrupted: the next run will put its files back")
        return "applicable"
    refuse_unknown(state)
    _refuse_half(state)
    if state.is_patched:
        check_result(target, patch_set)
        return "applied"
    return "applicable"


def _refuse_half(state: TreeState) -> None:
    """Refuse a mixture that no record explains."""
    done, left = state.of(PATCHED), state.of(STOCK)
    partial = state.of(PARTIAL)
    if state.record is not None or not (partial or (done and left)):
        return
    lines = [f"{f.path}: {f.kind}{': ' + f.why if f.why else ''}" for f in partial]
    lines += [f"{f.path}: {f.kind}" for f in [*done[:8], *left[:8]]]
    raise PatchSetError(
        "the target is half patched, and not by this program; nothing was changed",
        got="\n".join(lines),
        allowed="a stock tree, or a patched one",
        todo="make it stock with --reverse, then apply",
    )


def reverse(target: Target, patch_set: PatchSet, discard: bool = False) -> bool:
    """Make a tree stock again, byte for byte.

    Args:
        target: The tree.
        patch_set: What was applied.
        discard: Drop edits that were made since, where the original is known.

    Returns:
        Whether anything changed.

    Raises:
        PatchSetError: A file holds edits, or its original can't be had.

    """
    if not (target.root / STATE_DIR).exists() and look(target, patch_set).is_stock:
        say(f"already stock, nothing changed: {target.root}")
        return False
    with _owned(target):
        state = look(target, patch_set)
        if _replaced(state, patch_set):
            return _clean_leftovers(state)
        files = [*state.files, *state.stale]
        edited = [f for f in files if f.kind == OTHER]
        if discard:
            edited = [f for f in edited if not _recover(state, f)]
        lost = [f for f in files if f.origin != "overlay" and f.stock is None]
        lost = [f for f in lost if f in edited or not _take_released(patch_set, f)]
        if edited or lost:
            raise PatchSetError(
                "the target can't be made stock; nothing was changed",
                got="\n".join(
                    f"{f.path}: {f.why or 'its original is not known'}"
                    for f in {f.path: f for f in [*edited, *lost]}.values()
                ),
                allowed="files as they were patched",
                todo="unpack or install the release anew"
                if edited and discard
                else "keep the edits with scripts/export.sh, or add --discard"
                if edited
                else "run scripts/kv.py fetch, which has the originals, and try again",
            )
        changes = [Change(f.path, f.now, f.stock) for f in files if f.now != f.stock]
        # A record that a cut-off run didn't write doesn't know the folders it made.
        made = sorted(
            {*(state.record or {}).get("made_dirs", []), *_overlay_dirs(files)}
        )
        run_changes(target.root, changes)
        remove_empty_dirs(target.root, made)
        for f in files:
            if read_or_none(target.root / f.path) != f.stock:
                raise PatchSetError("a file isn't stock after the run", got=f.path)
        shutil.rmtree(target.root / STATE_DIR)
    say(f"stock again: {target.root} ({len(changes)} files changed)")
    return True


def _replaced(state: TreeState, patch_set: PatchSet) -> bool:
    """Tell whether another version was installed over the recorded one."""
    noted = (state.record or {}).get("version", patch_set.pin.version)
    return state.target.kind == INSTALLED and state.target.version != noted


def _clean_leftovers(state: TreeState) -> bool:
    """Remove what an upgrade underneath left of ours; touch nothing of its own."""
    root, record = state.target.root, state.record or {}
    changes, kept = [], []
    for path, note in sorted(record.get("files", {}).items()):
        now = read_or_none(root / path)
        if note["stock"] is None and now is not None:
            if sha256(now) == note["result"]:
                changes.append(Change(path, now, None))
            else:
                kept.append(path)
    run_changes(root, changes)
    remove_empty_dirs(root, record.get("made_dirs", []))
    shutil.rmtree(root / STATE_DIR)
    say(
        f"vLLM was replaced underneath ({record.get('version')} -> "
        f"{state.target.version}): removed {len(changes)} leftover files"
    )
    for path in kept:
        say(f"kept, as its content isn't ours: {path}")
    return True


def _recover(state: TreeState, f: FileState) -> bool:
    """For a file with edits, find its original; tell whether it can be dropped."""
    noted = (state.record or {}).get("files", {}).get(f.path)
    if noted is None:
        return False
    if f.stock is None and noted["stock"] is not None:
        kept = read_or_none(state.target.root / STATE_DIR / "stock" / f.path)
        if kept is not None and sha256(kept) == noted["stock"]:
            f.stock = kept
    return noted["stock"] is None or f.stock is not None


def _take_released(patch_set: PatchSet, f: FileState) -> bool:
    """Take the original of a replaced file from the cached release, if it is there."""
    pinned = patch_set.pin.shadow.get(f.path)
    if pinned is None:
        return False
    data = cached_member(patch_set.pin, f.path)
    if data is not None and sha256(data) == pinned:
        f.stock = data
    return f.stock is not None


def _overlay_dirs(files: list[FileState]) -> list[str]:
    """Folders of added files; removing them later stops at any that isn't empty."""
    return sorted(
        {
            parent.as_posix()
            for f in files
            if f.origin == "overlay"
            for parent in Path(f.path).parents
            if parent != Path(".")
        }
    )


def _executable(patch_set: PatchSet, path: str) -> bool:
    return path in patch_set.overlay and patch_set.overlay[path].executable


def _overlay_count(state: TreeState) -> int:
    return sum(f.origin != "patch" for f in state.files)


def _keep_originals(state: TreeState) -> None:
    for f in [*state.files, *state.stale]:
        if f.stock is not None:
            path = state.target.root / STATE_DIR / "stock" / f.path
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(f.stock)
            except OSError as error:
                raise unwritable(state.target.root, error) from error


def _take_back(root: Path, changes: list[Change], made: list[str]) -> None:
    run_changes(root, [Change(c.path, c.after, c.before) for c in changes])
    remove_empty_dirs(root, made)


def check_result(target: Target, patch_set: PatchSet) -> list[str]:
    """Check the postconditions on what stands on the disk, without importing.

    Returns:
        Class paths that the registry names resolve to.

    Raises:
        PatchSetError: A file isn't what the set makes, or a name doesn't resolve.

    """
    for f in look(target, patch_set).files:
        if f.kind != PATCHED:
            raise PatchSetError(
                "a file isn't the patched one after the run", got=f"{f.path}: {f.why}"
            )
    return [probe.probe_source(target.root, e) for e in patch_set.pin.registry]


def _check_import(target: Target, patch_set: PatchSet, wanted: bool) -> None:
    if not wanted or not patch_set.pin.registry:
        return
    if not probe.importable(target.root):
        say("the import probe is left out: this Python has no torch")
        return
    say("resolving the backends by import")
    for entry in patch_set.pin.registry:
        value = probe.probe_import(target.root, entry)
        say(f"  {entry.member} -> {value}")


def _write_record(state: TreeState, patch_set: PatchSet, made: list[str]) -> None:
    root = patch_set.root
    old = (state.record or {}).get("made_dirs", [])
    try:
        rev = git(root, "describe", "--always", "--dirty").stdout.strip()
    except FileNotFoundError:
        rev = ""
    record: dict[str, Any] = {
        "format": 1,
        "version": patch_set.pin.version,
        "kind": state.target.kind,
        "patch_set": patch_set.ident,
        "project_revision": rev,
        "patches": [{"name": p.name, "sha256": p.sha256} for p in patch_set.patches],
        "made_dirs": sorted({*old, *made}),
        "files": {
            f.path: {
                "origin": f.origin,
                "stock": None if f.stock is None else sha256(f.stock),
                "result": sha256(f.want or b""),
            }
            for f in state.files
        },
    }
    write_json(record_path(state.target.root), record)


def status(target: Target, patch_set: PatchSet) -> tuple[dict[str, Any], int]:
    """Describe a tree: version, what is applied, and whether it still is.

    Returns:
        The facts, and the exit status: 0 for stock or patched, 1 for anything else.

    """
    state = look(target, patch_set)
    record = state.record or {}
    other_version = target.version.split("+")[0] != patch_set.pin.version
    if state.interrupted:
        word = "interrupted: the next --reverse or apply puts its files back"
    elif record and (_replaced(state, patch_set)):
        word = "vLLM was replaced underneath: --reverse removes the leftovers"
    elif other_version:
        word = f"another version than the pinned {patch_set.pin.version}"
    elif state.is_patched:
        word = "patched" if record else "patched, without a record: apply adds it"
    elif state.is_stock:
        word = "stock"
    elif record and not state.of(OTHER):
        # What this state patches and the recorded one didn't was stock all along.
        noted = record["files"]
        stock = [
            f for f in state.of(STOCK) if f.origin != "overlay" and f.path in noted
        ]
        word = (
            "vLLM was reinstalled underneath: apply patches it again"
            if stock
            else "patched by another state of this patch set: apply updates it"
        )
    else:
        word = "half patched or edited"
    good = word in ("patched", "stock")
    facts = {
        "target": str(target.root),
        "kind": target.kind,
        "version": f"{target.version} ({target.evidence})",
        "state": word,
        "patch_set": patch_set.ident,
        "applied_patch_set": record.get("patch_set", "none"),
        "applied_from_revision": record.get("project_revision", ""),
        "applied_patches": record.get("patches", []),
        "files": [
            {
                "path": f.path,
                "origin": f.origin,
                "state": f.kind,
                "sha256": None if f.now is None else sha256(f.now),
                **({"why": f.why} if f.why else {}),
            }
            for f in [*state.files, *state.stale]
        ],
    }
    return facts, 0 if good else 1
