# SPDX-License-Identifier: Apache-2.0
"""Change several files of a tree, all or none, whatever interrupts it.

Everything new is written beside its place first, then a journal, then each file
is moved into place; the journal goes last. A run that finds a journal puts back
what the interrupted one had moved.

    .kv-balanced-mla/
      .gitignore     "*": the folder stays out of a clone's status
      lock           held while a run changes the tree
      record.json    what is applied (apply.py)
      stock/         upstream's originals of the files that are replaced
      stage/, undo/  new files on their way, and what they replace
      journal.json   present only while files move
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import PatchSetError
from .mailpatch import blob_id

STATE_DIR = ".kv-balanced-mla"


@dataclass(frozen=True)
class Change:
    """One file's move from one content to another; None means no file.

    Attributes:
        path: Relative to the tree's root.
        before: Bytes that stand there now.
        after: Bytes that shall stand there.
        executable: Mode of a new file; an existing one keeps its mode.

    """

    path: str
    before: bytes | None
    after: bytes | None
    executable: bool = False


def read_or_none(path: Path) -> bytes | None:
    """Return a file's bytes, or None where there is no file."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None


@contextlib.contextmanager
def tree_lock(root: Path) -> Iterator[None]:
    """Hold the tree for one run; create the state folder if need be.

    Raises:
        PatchSetError: Another run holds it, or the tree can't be written.

    """
    state = root / STATE_DIR
    try:
        state.mkdir(exist_ok=True)
        (state / ".gitignore").write_text("*\n")
        lock = open(state / "lock", "w")  # noqa: SIM115 - entered below
    except OSError as error:
        raise unwritable(root, error) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise PatchSetError(
                "another run is changing this tree",
                got=f"{state / 'lock'} is held",
                todo="wait for it to end",
            ) from error
        yield


def unwritable(root: Path, error: OSError) -> PatchSetError:
    """Return the error for a tree that this user can't change."""
    return PatchSetError(
        "the target can't be written; nothing was changed",
        got=f"{error.filename or root}: {error.strerror}",
        allowed="write access to the tree's folders and files",
        todo="run as its owner, or copy the tree (or the environment) and pass that",
    )


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into an exception, so that a move is taken back."""

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt(f"signal {number}")

    caught = {}
    for number in (signal.SIGTERM, signal.SIGHUP):
        with contextlib.suppress(ValueError):  # not in the main thread
            caught[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for number, old in caught.items():
            signal.signal(number, old)


def _write_durably(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that a reader sees the old or the new file, never a part."""
    tmp = path.with_name(path.name + ".new")
    _write_durably(tmp, (json.dumps(value, indent=1, sort_keys=True) + "\n").encode())
    os.replace(tmp, path)


def read_json(path: Path) -> Any | None:
    """Return parsed JSON, or None where there is no file.

    Raises:
        PatchSetError: The file is no JSON.

    """
    data = read_or_none(path)
    try:
        return None if data is None else json.loads(data)
    except ValueError as error:
        raise PatchSetError(
            "the tree's state file is damaged",
            got=f"{path}: {error}",
            todo="unpack or install the release anew, then apply",
        ) from error


def run_changes(root: Path, changes: list[Change]) -> list[str]:
    """Carry out all changes, or none.

    Args:
        root: The tree; the caller holds its lock.
        changes: Each with what the caller found before.

    Returns:
        Folders that were created, parents first.

    Raises:
        PatchSetError: The tree can't be written; it stands as before.

    """
    state = root / STATE_DIR
    stage, undo = state / "stage", state / "undo"
    made_dirs: list[str] = []
    try:
        _drop_scratch(state)
        for i, change in enumerate(changes):
            _check_writable(root / change.path)
            if change.before is not None:
                _write_durably(undo / change.path, change.before)
            if change.after is not None:
                new = stage / str(i)
                _write_durably(new, change.after)
                os.chmod(new, _mode(root / change.path, change.executable))
        made_dirs = _missing_dirs(root, changes)
        write_json(state / "journal.json", _journal(changes, made_dirs))
    except OSError as error:
        _drop_scratch(state)
        with contextlib.suppress(OSError):
            (state / "journal.json").unlink()
        raise unwritable(root, error) from error
    with _terminable():
        try:
            for folder in made_dirs:
                (root / folder).mkdir(exist_ok=True)
            for i, change in enumerate(changes):
                _move(root, stage / str(i), change)
        except BaseException as error:
            repair(root)
            if isinstance(error, OSError):
                raise unwritable(root, error) from error
            raise
        (state / "journal.json").unlink()
        _drop_scratch(state)
    return made_dirs


def _drop_scratch(state: Path) -> None:
    for name in ("stage", "undo"):
        shutil.rmtree(state / name, ignore_errors=True)


def _move(root: Path, staged: Path, change: Change) -> None:
    """Put one file into place. A rename: never half a file, never a shared inode."""
    path = root / change.path
    if change.after is None:
        path.unlink()
    else:
        os.replace(staged, path)
    _drop_bytecode(path)


def _drop_bytecode(path: Path) -> None:
    # Bytecode is keyed by whole seconds and size: two versions of a file written
    # in one second would share it.
    for old in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        old.unlink()


def _mode(path: Path, executable: bool) -> int:
    if path.exists():
        return path.stat().st_mode & 0o7777
    return 0o755 if executable else 0o644


def _check_writable(path: Path) -> None:
    folder = path.parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise NotADirectoryError(20, "not a folder", str(folder))
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        raise PermissionError(13, "no write access", str(folder))


def _missing_dirs(root: Path, changes: list[Change]) -> list[str]:
    missing: set[Path] = set()
    for change in changes:
        if change.after is not None:
            for parent in Path(change.path).parents:
                if not (root / parent).exists():
                    missing.add(parent)
    return [p.as_posix() for p in sorted(missing, key=lambda p: len(p.parts))]


def _journal(changes: list[Change], made_dirs: list[str]) -> dict[str, Any]:
    def ident(data: bytes | None) -> str | None:
        return None if data is None else blob_id(data)

    moves = [
        {"path": c.path, "before": ident(c.before), "after": ident(c.after)}
        for c in changes
    ]
    return {"moves": moves, "made_dirs": made_dirs}


def interrupted(root: Path) -> bool:
    """Tell whether an earlier run was cut off while it moved files."""
    return (root / STATE_DIR / "journal.json").exists()


def repair(root: Path) -> list[str]:
    """Put back what an interrupted run had moved; return those paths.

    Raises:
        PatchSetError: A file is neither as before nor as the run meant it.

    """
    state = root / STATE_DIR
    journal = read_json(state / "journal.json")
    if journal is None:
        return []
    back: list[tuple[str, bytes | None]] = []
    for move in journal["moves"]:
        now = read_or_none(root / move["path"])
        ident = None if now is None else blob_id(now)
        if ident == move["before"]:
            continue
        old = None
        if move["before"] is not None:
            old = read_or_none(state / "undo" / move["path"])
            if old is None or blob_id(old) != move["before"]:
                ident = "its kept original is gone"
        if ident != move["after"]:
            raise PatchSetError(
                "an interrupted run can't be taken back",
                got=f"{move['path']}: {ident or 'no file'}",
                allowed=f"blob {move['before']} or {move['after']}",
                todo="unpack or install the release anew, then apply",
            )
        back.append((move["path"], old))
    for path, old in back:
        if old is None:
            (root / path).unlink()
        else:
            tmp = state / "stage" / "back"
            _write_durably(tmp, old)
            os.chmod(tmp, _mode(root / path, False))
            os.replace(tmp, root / path)
        _drop_bytecode(root / path)
    remove_empty_dirs(root, journal["made_dirs"])
    (state / "journal.json").unlink()
    _drop_scratch(state)
    return [path for path, _ in back]


def remove_empty_dirs(root: Path, folders: list[str]) -> None:
    """Remove folders, deepest first, where nothing but bytecode is left in them."""
    for folder in sorted(folders, key=lambda f: -len(Path(f).parts)):
        path = root / folder
        if not path.is_dir() or set(os.listdir(path)) - {"__pycache__"}:
            continue
        shutil.rmtree(path / "__pycache__", ignore_errors=True)
        path.rmdir()
