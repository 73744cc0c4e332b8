# SPDX-License-Identifier: Apache-2.0
"""Merge two edits of one text, as git does."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from .errors import PatchSetError


def merge(
    mine: bytes, base: bytes, edited: bytes, labels: tuple[str, str, str]
) -> tuple[bytes, bool]:
    """Return `mine` with the change from `base` to `edited`.

    Args:
        mine: One edit of `base`.
        base: What both started from.
        edited: The other edit.
        labels: What conflict markers call the three.

    Returns:
        The text, with conflict markers where both changed the same lines; and whether
        there are none.

    Raises:
        PatchSetError: git isn't there, or fails.

    """
    with tempfile.TemporaryDirectory() as tmp:
        names = []
        for i, data in enumerate((mine, base, edited)):
            names.append(Path(tmp) / str(i))
            names[-1].write_bytes(data)
        words = [word for label in labels for word in ("-L", label)]
        command = ["git", "merge-file", "-p", "--diff3", *words, *map(str, names)]
        try:
            ran = subprocess.run(command, capture_output=True)
        except FileNotFoundError as error:
            raise PatchSetError(
                "edits can't be merged: git isn't installed", todo="install git"
            ) from error
    if ran.returncode > 127:  # up to there, it is the number of conflicts
        raise PatchSetError(
            "git merge-file failed", got=ran.stderr.decode(errors="replace").strip()
        )
    return ran.stdout, ran.returncode == 0
