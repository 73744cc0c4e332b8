# SPDX-License-Identifier: Apache-2.0
"""Where a tree stands: each file of the patch set is stock, patched, or neither."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import PatchSetError
from .mailpatch import HunkError, apply_file, blob_id, same_blob
from .patchset import PatchSet, patched_bytes, stock_bytes
from .target import Target
from .transact import STATE_DIR, interrupted, read_json, read_or_none

EDITED = (
    "edited since it was applied; keep the edit with scripts/export.sh, or drop it "
    "with --reverse --discard"
)
STOCK, PATCHED, RECORDED, PARTIAL, OTHER = (
    "stock",
    "patched",
    "patched by another state of this set",
    "some patches applied",
    "unknown content",
)


def sha256(data: bytes) -> str:
    """Return the sha256 of bytes as hex digits."""
    return hashlib.sha256(data).hexdigest()


@dataclass
class FileState:
    """One file: what stands there, and what stands there before and after.

    Attributes:
        path: Relative to the tree's root.
        origin: "patch", "overlay" or "shadow".
        now: Bytes in the tree, None where there is no file.
        kind: One of the states above.
        stock: Upstream's bytes, None where upstream has no file or they can't
            be had from this tree.
        want: The patched bytes; None where they can't be made from this tree.
        why: For OTHER and PARTIAL, what is wrong.

    """

    path: str
    origin: str
    now: bytes | None
    kind: str
    stock: bytes | None = None
    want: bytes | None = None
    why: str = ""


@dataclass
class TreeState:
    """All files of the set in one tree.

    Attributes:
        target: The tree.
        files: The set's files, sorted by path.
        stale: Files that the record names and the set no longer has.
        record: What an earlier run noted, or None.
        interrupted: An earlier run was cut off while moving files.

    """

    target: Target
    files: list[FileState]
    stale: list[FileState] = field(default_factory=list)
    record: dict[str, Any] | None = None
    interrupted: bool = False

    def of(self, *kinds: str) -> list[FileState]:
        """Return the files in one of the given states."""
        return [f for f in [*self.files, *self.stale] if f.kind in kinds]

    @property
    def is_patched(self) -> bool:
        """Every file is as the set wants it, and nothing older is left."""
        return not self.stale and all(f.kind == PATCHED for f in self.files)

    @property
    def is_stock(self) -> bool:
        """Every file is upstream's."""
        return not self.stale and all(f.kind == STOCK for f in self.files)


def record_path(root: Path) -> Path:
    """Return where a tree's record lies."""
    return root / STATE_DIR / "record.json"


def kept_stock(root: Path, path: str) -> bytes | None:
    """Return the original that an earlier run kept, or None."""
    return read_or_none(root / STATE_DIR / "stock" / path)


def look(target: Target, patch_set: PatchSet) -> TreeState:
    """Compare a tree with the patch set, writing nothing."""
    record = read_json(record_path(target.root))
    noted = (record or {}).get("files", {})
    files = [
        _look_at(target.root, patch_set, path, noted.get(path, {}).get("result"))
        for path in patch_set.paths(target.takes)
    ]
    known = {f.path for f in files}
    stale = [
        _look_at_stale(target.root, path, note)
        for path, note in sorted(noted.items())
        if path not in known
    ]
    return TreeState(target, files, stale, record, interrupted(target.root))


def _look_at(root: Path, ps: PatchSet, path: str, noted: str | None) -> FileState:
    now = read_or_none(root / path)
    if path in ps.overlay:
        return _look_at_overlay(root, ps, path, now, noted)
    parts = ps.edits[path]
    state = FileState(path, "patch", now, OTHER)
    if now is None:
        state.why = "the file is missing"
        return state
    ident = blob_id(now)
    if same_blob(ident, parts[0][1].old_blob):
        state.kind, state.stock, state.want = STOCK, now, patched_bytes(now, parts)
    elif same_blob(ident, parts[-1][1].new_blob):
        state.kind, state.stock, state.want = PATCHED, stock_bytes(now, parts), now
    elif noted == sha256(now) and (old := kept_stock(root, path)) is not None:
        state.kind, state.stock = RECORDED, old
        state.want = patched_bytes(old, parts)
    else:
        for count, (_, part) in enumerate(parts[:-1], 1):
            if same_blob(ident, part.new_blob):
                state.kind = PARTIAL
                state.stock = stock_bytes(now, parts[:count])
                state.want = patched_bytes(state.stock, parts)
                state.why = (
                    f"{parts[count - 1][0].name} is applied, "
                    f"{parts[count][0].name} is not"
                )
                return state
        edited = noted is not None and noted != sha256(now)
        state.why = EDITED if edited else _first_miss(now, parts)
    return state


def _first_miss(now: bytes, parts: list) -> str:
    """Say where an unknown file first disagrees with the series."""
    data = now
    for patch, part in parts:
        try:
            data = apply_file(data, part, patch.name)
        except HunkError as error:
            return f"patch {patch.name}, hunk {error.number}: {error.got}" + (
                f"; the hunk's lines stand at line {error.found_at}"
                if error.found_at
                else f"; the patch wants {error.allowed}"
            )
    return (
        f"every hunk would apply, but the file isn't the pinned one "
        f"(blob {blob_id(now)}, pinned {parts[0][1].old_blob})"
    )


def _look_at_overlay(
    root: Path, ps: PatchSet, path: str, now: bytes | None, noted: str | None
) -> FileState:
    want = ps.overlay[path].data
    pinned = ps.pin.shadow.get(path)
    state = FileState(path, "shadow" if pinned else "overlay", now, OTHER, want=want)
    if pinned:
        state.stock = now if now is not None and sha256(now) == pinned else None
        if state.stock is None:
            kept = kept_stock(root, path)
            if kept is not None and sha256(kept) == pinned:
                state.stock = kept
    if now == want:
        state.kind = PATCHED
    elif (now is None and not pinned) or (
        pinned and now is not None and sha256(now) == pinned
    ):
        state.kind = STOCK
    elif now is not None and noted == sha256(now):
        state.kind = RECORDED
    elif now is not None and noted:
        state.why = EDITED
    elif pinned:
        got = "no file" if now is None else f"sha256 {sha256(now)}"
        state.why = f"{got}; UPSTREAM.toml [shadow] says {pinned}"
    else:
        state.why = (
            "a file of another content stands where the overlay adds one"
            " (if upstream has it, list it in UPSTREAM.toml [shadow])"
        )
    return state


def _look_at_stale(root: Path, path: str, note: dict[str, Any]) -> FileState:
    now = read_or_none(root / path)
    state = FileState(path, note["origin"], now, OTHER)
    if note["stock"] is not None:
        state.stock = kept_stock(root, path)
    state.want = state.stock
    stock_there = None if now is None else sha256(now)
    if stock_there == note["result"]:
        state.kind = RECORDED
    elif stock_there == note["stock"]:
        state.kind = STOCK
    else:
        state.why = "changed since it was patched"
    return state


def refuse_unknown(state: TreeState) -> None:
    """Raise for a tree that holds content which is neither stock nor ours.

    Raises:
        PatchSetError: With patch, file and hunk of each.

    """
    bad = state.of(OTHER)
    if not bad:
        return
    edited = state.record is not None
    raise PatchSetError(
        f"{len(bad)} file(s) of the target differ from the pinned release; "
        "nothing was changed",
        got="\n".join(f"{f.path}: {f.why}" for f in bad),
        allowed="upstream's files, or the patched ones",
        todo="keep edits of a patched tree with scripts/export.sh, or drop them "
        "with --reverse --discard"
        if edited
        else "use a clean tree (git stash, a fresh unpacking, or run without TARGET); "
        "if it is clean and the pin has just moved, scripts/export.sh --port",
    )
