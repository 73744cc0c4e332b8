# SPDX-License-Identifier: Apache-2.0
"""Write a patch in the one form that this set keeps, byte for byte the same."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

from .errors import PatchSetError
from .mailpatch import FilePatch, Patch
from .patchset import PatchSet, patched_bytes

# No user's or system's git configuration has a say in what a patch looks like.
_GIT_ENV = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "LC_ALL": "C",
}
_DIFF = [
    *("git", "--no-pager", "diff", "--no-index", "--no-color", "--no-ext-diff"),
    *("--no-textconv", "--no-renames", "--full-index", "--unified=3"),
    *("--inter-hunk-context=0", "--diff-algorithm=histogram", "--indent-heuristic"),
    *("--src-prefix=", "--dst-prefix="),
]


def diff(path: str, old: bytes, new: bytes) -> bytes:
    """Return git's diff of one file, with full blob ids.

    Args:
        path: The file's path in the tree.
        old: Bytes before.
        new: Bytes after.

    Raises:
        PatchSetError: git isn't there, or fails.

    """
    with tempfile.TemporaryDirectory() as tmp:
        for side, data in (("a", old), ("b", new)):
            file = Path(tmp) / side / path
            file.parent.mkdir(parents=True)
            file.write_bytes(data)
        try:
            ran = subprocess.run(
                [*_DIFF, f"a/{path}", f"b/{path}"],
                cwd=tmp,
                env={**os.environ, **_GIT_ENV},
                capture_output=True,
            )
        except FileNotFoundError as error:
            raise PatchSetError(
                "patches can't be written: git isn't installed", todo="install git"
            ) from error
    if ran.returncode != 1:
        raise PatchSetError(
            f"git wrote no diff of {path}",
            got=ran.stderr.decode(errors="replace").strip() or "both sides are alike",
        )
    return ran.stdout


def render(header: str, edits: list[tuple[str, bytes, bytes]]) -> bytes:
    """Return a patch file: the header as it stands, then the files by path.

    Args:
        header: Everything before the first `diff --git` line.
        edits: (path, bytes before, bytes after).

    """
    parts = [diff(path, old, new) for path, old, new in sorted(edits)]
    return header.rstrip("\n").encode() + b"\n" + b"".join(parts)


def rerender(
    patch_set: PatchSet, patch: Patch, stock: dict[str, bytes]
) -> tuple[bytes, bytes]:
    """Return what a patch file holds and what it would be written as.

    Args:
        patch_set: The set.
        patch: One of its patches.
        stock: Upstream's bytes of the files that the series edits.

    """
    edits = []
    for part in patch.files:
        parts = patch_set.edits[part.path]
        at = _position(parts, patch)
        before = patched_bytes(stock[part.path], parts, at)
        edits.append(
            (part.path, before, patched_bytes(stock[part.path], parts, at + 1))
        )
    kept = (patch_set.root / "patches" / patch.name).read_bytes()
    return kept, render(patch.header, edits)


def _position(parts: list[tuple[Patch, FilePatch]], patch: Patch) -> int:
    return next(i for i, (p, _) in enumerate(parts) if p.name == patch.name)
