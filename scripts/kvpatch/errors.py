# SPDX-License-Identifier: Apache-2.0
"""Errors that tell a reader what happened, what was expected and what to do."""

from __future__ import annotations


class PatchSetError(Exception):
    """A step could not be done; nothing was left half done.

    Args:
        what: What went wrong, in one sentence.
        got: What was found.
        allowed: What would have been accepted.
        todo: What the reader can do about it.

    """

    def __init__(self, what: str, *, got: str = "", allowed: str = "", todo: str = ""):
        self.what, self.got, self.allowed, self.todo = what, got, allowed, todo
        lines = [what]
        for label, text in (("got", got), ("allowed", allowed), ("to do", todo)):
            if text:
                body = text.replace("\n", "\n           ")
                lines.append(f"  {label + ':':<9}{body}")
        super().__init__("\n".join(lines))
