# SPDX-License-Identifier: Apache-2.0
"""The patch set as a whole: pin, series and overlay, and what they make of a tree."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .errors import PatchSetError
from .mailpatch import FilePatch, Patch, apply_file, blob_id, load_series, same_blob
from .pin import Pin, load_pin

# Files that an editor, a test run or an interpreter leaves behind.
JUNK_DIRS = {"__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache"}
JUNK_ENDS = (".pyc", ".orig", ".rej", ".swp", "~")


@dataclass(frozen=True)
class OverlayFile:
    """A whole file of the overlay.

    Attributes:
        data: Its bytes.
        executable: Whether it carries the executable bit.

    """

    data: bytes
    executable: bool


@dataclass(frozen=True)
class PatchSet:
    """Everything that turns a stock tree into a patched one.

    Attributes:
        root: This project's folder.
        pin: The release it is made for.
        patches: The series, in order.
        overlay: Path in the tree -> file.

    """

    root: Path
    pin: Pin
    patches: tuple[Patch, ...]
    overlay: dict[str, OverlayFile]

    @property
    def edits(self) -> dict[str, list[tuple[Patch, FilePatch]]]:
        """Path -> the patches that edit it, in series order."""
        found: dict[str, list[tuple[Patch, FilePatch]]] = {}
        for patch in self.patches:
            for part in patch.files:
                found.setdefault(part.path, []).append((patch, part))
        return found

    @property
    def ident(self) -> str:
        """16 hex digits that name exactly these patches and this overlay."""
        digest = hashlib.sha256(self.pin.version.encode())
        for patch in self.patches:
            digest.update(f"\0{patch.name}\0{patch.sha256}".encode())
        for path, file in sorted(self.overlay.items()):
            digest.update(f"\0{path}\0{file.executable}\0".encode())
            digest.update(hashlib.sha256(file.data).digest())
        return digest.hexdigest()[:16]

    def paths(self, keep: Callable[[str], bool] = lambda path: True) -> list[str]:
        """Return every path that the set touches or adds, sorted."""
        return sorted(p for p in {*self.edits, *self.overlay} if keep(p))


def load_patch_set(root: Path, chained: bool = True) -> PatchSet:
    """Load the patch set of a project folder and check that its parts agree.

    Args:
        root: The project's folder.
        chained: Require that the blobs of one file follow from patch to patch.

    Raises:
        PatchSetError: A part can't be read, a file is both patched and in the
            overlay, a shadowed file isn't in the overlay, or the blobs of one
            file don't follow from patch to patch.

    """
    pin = load_pin(root)
    patches = tuple(load_series(root / "patches"))
    overlay = _load_overlay(root / "vllm_overlay")
    made = PatchSet(root, pin, patches, overlay)
    if both := sorted(set(made.edits) & set(overlay)):
        raise PatchSetError(
            "a file is patched and in the overlay",
            got=", ".join(both),
            allowed="one of both: edit upstream files by patch, add files by overlay",
        )
    if lost := sorted(set(pin.shadow) - set(overlay)):
        raise PatchSetError(
            "UPSTREAM.toml [shadow] lists files that the overlay doesn't hold",
            got=", ".join(lost),
            todo="remove the line, or add the file to vllm_overlay/",
        )
    for path, parts in made.edits.items() if chained else ():
        for (_, before), (patch, after) in zip(parts, parts[1:]):
            if not before.new_blob.startswith(after.old_blob[:7]):
                raise PatchSetError(
                    f"patch {patch.name} doesn't follow from the one before: {path}",
                    got=f"it starts from blob {after.old_blob}",
                    allowed=f"blob {before.new_blob}",
                    todo="place the patches anew: scripts/export.sh --port",
                )
    return made


def _load_overlay(root: Path) -> dict[str, OverlayFile]:
    files: dict[str, OverlayFile] = {}
    for path in sorted(root.rglob("*")) if root.is_dir() else []:
        if path.is_symlink():
            raise PatchSetError(
                "the overlay holds a symbolic link", got=str(path), allowed="files"
            )
        name = path.relative_to(root)
        junk = JUNK_DIRS.intersection(name.parts) or name.name.endswith(JUNK_ENDS)
        if path.is_file() and not junk:
            executable = bool(path.stat().st_mode & 0o100)
            files[name.as_posix()] = OverlayFile(path.read_bytes(), executable)
    return files


def patched_bytes(
    stock: bytes, parts: list[tuple[Patch, FilePatch]], upto: int | None = None
) -> bytes:
    """Apply a file's edits to its stock bytes and check every blob on the way.

    Args:
        stock: Upstream's bytes.
        parts: The file's edits, from `PatchSet.edits`.
        upto: Apply only the first so many.

    Raises:
        HunkError: A hunk doesn't stand at its place.
        PatchSetError: A result isn't the blob that the patch names.

    """
    data = stock
    for patch, part in parts[:upto]:
        data = apply_file(data, part, patch.name)
        if not same_blob(blob_id(data), part.new_blob):
            raise PatchSetError(
                f"patch {patch.name} gives another file than it says: {part.path}",
                got=f"blob {blob_id(data)}",
                allowed=f"blob {part.new_blob}",
                todo="the patch was edited by hand: scripts/export.sh --port writes it "
                "anew",
            )
    return data


def stock_bytes(current: bytes, parts: list[tuple[Patch, FilePatch]]) -> bytes:
    """Reverse all of a file's edits, last first.

    Raises:
        HunkError: A hunk's result doesn't stand at its place.
        PatchSetError: The result isn't upstream's blob.

    """
    data = current
    for patch, part in reversed(parts):
        data = apply_file(data, part, patch.name, reverse=True)
        if not same_blob(blob_id(data), part.old_blob):
            raise PatchSetError(
                f"reversing patch {patch.name} doesn't give upstream's {part.path}",
                got=f"blob {blob_id(data)}",
                allowed=f"blob {part.old_blob}",
            )
    return data
