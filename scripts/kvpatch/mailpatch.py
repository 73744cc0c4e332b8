# SPDX-License-Identifier: Apache-2.0
"""Patches in mail format: parse, apply and reverse without fuzz or offset.

A patch edits existing text files only. Each file's `index` line names the blobs
before and after, so a series carries its own manifest: the first blob of a file
is upstream's, the last one is what the patched tree must hold.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import PatchSetError

_HUNK = re.compile(rb"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@(.*)$")
_INDEX = re.compile(r"^index ([0-9a-f]{7,40})\.\.([0-9a-f]{7,40})(?: (\d{6}))?$")
_FORBIDDEN = (
    "new file mode",
    "deleted file mode",
    "rename from",
    "copy from",
    "old mode",
    "Binary files",
    "GIT binary patch",
)
TRAILERS = ("Kind", "Forwarded", "Bug", "Remove-When", "Test")
KINDS = ("registration", "gate", "hook", "bugfix", "test", "docs")


def blob_id(data: bytes) -> str:
    """Return git's blob id of a file's bytes (40 hex digits)."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def same_blob(full: str, short: str) -> bool:
    """Tell whether a full blob id is the one that a (short) id names."""
    return full.startswith(short)


@dataclass(frozen=True)
class Hunk:
    """One hunk: 1-based position and length on both sides, and its lines.

    `lines` keep their first byte (space, minus, plus) and their line ending; a
    line without one ends the file.
    """

    old_start: int
    old_len: int
    new_start: int
    new_len: int
    lines: tuple[bytes, ...]

    def side(self, reverse: bool, before: bool) -> list[bytes]:
        """Return the lines that the hunk expects (`before`) or leaves."""
        drop = b"+" if before != reverse else b"-"
        return [line[1:] for line in self.lines if line[:1] != drop]


@dataclass(frozen=True)
class FilePatch:
    """The part of a patch that edits one file."""

    path: str
    old_blob: str
    new_blob: str
    hunks: tuple[Hunk, ...]

    @property
    def changed_lines(self) -> int:
        """Added plus removed lines."""
        return sum(li[:1] in b"+-" for h in self.hunks for li in h.lines)


@dataclass(frozen=True)
class Patch:
    """One patch file: its header, as text and parsed, and its edits."""

    name: str
    header: str
    subject: str
    body: str
    trailers: dict[str, str]
    files: tuple[FilePatch, ...]
    sha256: str

    @property
    def changed_lines(self) -> int:
        """Added plus removed lines over all files."""
        return sum(f.changed_lines for f in self.files)


class HunkError(PatchSetError):
    """A hunk doesn't stand where the patch says.

    Attributes:
        patch: Patch name.
        path: File.
        number: 1-based number of the hunk in that file.
        found_at: 1-based line where its lines stand instead, or None.

    """

    def __init__(self, patch: str, path: str, number: int, hunk: Hunk, **more):
        self.patch, self.path, self.number = patch, path, number
        self.found_at: int | None = more.pop("found_at", None)
        verb = "reverse" if more.pop("reverse", False) else "apply"
        super().__init__(
            f"patch {patch} doesn't {verb}: {path}, hunk {number} (line "
            f"{hunk.old_start})",
            **more,
        )


def split_lines(data: bytes) -> list[bytes]:
    """Split at line feeds only, keeping them."""
    lines = data.split(b"\n")
    tail = lines.pop()
    return [line + b"\n" for line in lines] + ([tail] if tail else [])


def _find(lines: Sequence[bytes], block: Sequence[bytes], near: int) -> int | None:
    """Return the 0-based place nearest to `near` where `block` stands."""
    if not block:
        return None
    spots = [
        i
        for i in range(len(lines) - len(block) + 1)
        if lines[i] == block[0] and list(lines[i : i + len(block)]) == list(block)
    ]
    return min(spots, key=lambda i: abs(i - near)) if spots else None


def apply_file(
    data: bytes, part: FilePatch, patch_name: str, reverse: bool = False
) -> bytes:
    """Apply (or reverse) one file's hunks exactly where they say.

    Args:
        data: The file's bytes.
        part: The edits.
        patch_name: For error messages.
        reverse: Undo instead.

    Returns:
        The edited bytes.

    Raises:
        HunkError: A hunk's lines don't stand at its place.

    """
    lines = split_lines(data)
    out: list[bytes] = []
    done = 0
    for number, hunk in enumerate(part.hunks, 1):
        start, length = hunk.old_start, hunk.old_len
        if reverse:
            start, length = hunk.new_start, hunk.new_len
        # With no old lines, the number names the line before the insertion.
        at = start - 1 if length else start
        want = hunk.side(reverse, before=True)
        got = lines[at : at + len(want)]
        if at < done or got != want:
            bad = next(
                (i for i, w in enumerate(want) if i >= len(got) or got[i] != w), 0
            )
            spot = _find(lines, want, at)
            raise HunkError(
                patch_name,
                part.path,
                number,
                hunk,
                reverse=reverse,
                found_at=None if spot is None else spot + 1,
                got=f"line {at + bad + 1}: " + show_line(got, bad),
                allowed=f"line {at + bad + 1}: " + show_line(want, bad),
                todo="compare the tree with the pinned release"
                if spot is None
                else f"the lines stand at {spot + 1}: another version's file?",
            )
        out += lines[done:at]
        out += hunk.side(reverse, before=False)
        done = at + len(want)
    return b"".join(out + lines[done:])


def show_line(lines: Sequence[bytes], i: int) -> str:
    """Return the 0-based line `i` as a message shows it."""
    return repr(lines[i].decode(errors="replace")) if i < len(lines) else "end of file"


def parse_patch(name: str, raw: bytes) -> Patch:
    """Parse a patch file.

    Raises:
        PatchSetError: It is not in mail format, creates, deletes or renames
            files, or a hunk's counts don't match its lines.

    """
    start = raw.find(b"diff --git ")
    if start != 0 and (start := raw.find(b"\ndiff --git ") + 1) == 0:
        raise _bad(name, 1, "no `diff --git` line", "at least one file's edits")
    header = raw[:start].decode()
    subject, body, trailers = _parse_header(name, header)
    first = header.count("\n") + 1
    files = _parse_files(name, split_lines(raw[start:]), first)
    paths = [f.path for f in files]
    if len(set(paths)) != len(paths):
        raise _bad(name, first, "a file appears twice", "each file once")
    return Patch(
        name, header, subject, body, trailers, files, hashlib.sha256(raw).hexdigest()
    )


def _bad(name: str, line: int, got: str, allowed: str) -> PatchSetError:
    return PatchSetError(
        f"patches/{name}, line {line}: not a patch that this set can hold",
        got=got,
        allowed=allowed,
        todo="see patches/README.md; scripts/export.sh writes the right form",
    )


def _parse_header(name: str, header: str) -> tuple[str, str, dict[str, str]]:
    head, _, rest = header.partition("\n\n")
    subject = ""
    for line in head.split("\n"):
        if line.startswith("Subject:"):
            subject = line[8:].strip()
        elif subject and line.startswith(" "):
            subject += line.rstrip()
        elif subject:
            break
    subject = re.sub(r"^\[PATCH[^]]*\]\s*", "", subject)
    if not subject:
        raise _bad(name, 1, "no Subject: line", "Subject: <area>: <what>")
    message = re.split(r"(?m)^---$", rest)[0].strip("\n")
    blocks = message.split("\n\n")
    trailers: dict[str, str] = {}
    last = ""
    for line in blocks[-1].split("\n"):
        key, sep, value = line.partition(":")
        if sep and re.fullmatch(r"[A-Z][A-Za-z-]+", key):
            trailers[key] = value.strip()
            last = key
        elif last and line.startswith(" "):
            trailers[last] += " " + line.strip()
        else:
            trailers = {}
            break
    body = "\n\n".join(blocks[:-1] if trailers else blocks).strip()
    return subject, body, trailers


def _parse_files(name: str, lines: list[bytes], first: int) -> tuple[FilePatch, ...]:
    files: list[FilePatch] = []
    i = 0
    while i < len(lines):
        text = lines[i].decode(errors="replace").rstrip("\n")
        if not text.startswith("diff --git "):
            rest = lines[i:]
            if text in ("-- ", "") and not any(li.startswith(b"diff ") for li in rest):
                break  # the mail signature ends a patch
            raise _bad(name, first + i, repr(text), "`diff --git` or the end")
        match = re.fullmatch(r"diff --git a/(.+) b/(.+)", text)
        if not match or match[1] != match[2]:
            raise _bad(name, first + i, repr(text), "the same path on both sides")
        path = match[1]
        if path.startswith("/") or ".." in Path(path).parts:
            raise _bad(name, first + i, path, "a path inside the tree")
        i, blobs = _parse_file_head(name, lines, i + 1, first, path)
        hunks: list[Hunk] = []
        while i < len(lines) and lines[i].startswith(b"@@ "):
            i, hunk = _parse_hunk(name, lines, i, first)
            hunks.append(hunk)
        if not hunks:
            raise _bad(name, first + i, f"no hunk for {path}", "at least one")
        files.append(FilePatch(path, *blobs, tuple(hunks)))
    return tuple(files)


def _parse_file_head(
    name: str, lines: list[bytes], i: int, first: int, path: str
) -> tuple[int, tuple[str, str]]:
    blobs: tuple[str, str] | None = None
    while i < len(lines) and not lines[i].startswith(b"@@ "):
        text = lines[i].decode(errors="replace").rstrip("\n")
        if text.startswith(_FORBIDDEN):
            raise _bad(
                name, first + i, text, "edits of existing files; new files: overlay"
            )
        if match := _INDEX.match(text):
            blobs = (match[1], match[2])
        elif not text.startswith(("--- a/" + path, "+++ b/" + path)):
            raise _bad(name, first + i, repr(text), "index, --- and +++ lines")
        i += 1
    if blobs is None:
        raise _bad(name, first + i, f"no index line for {path}", "index OLD..NEW")
    return i, blobs


def _parse_hunk(name: str, lines: list[bytes], i: int, first: int) -> tuple[int, Hunk]:
    match = _HUNK.match(lines[i].rstrip(b"\n"))
    if not match:
        raise _bad(name, first + i, repr(lines[i]), "@@ -a,b +c,d @@")
    old_start, new_start = int(match[1]), int(match[3])
    old_len = int(match[2]) if match[2] else 1
    new_len = int(match[4]) if match[4] else 1
    body: list[bytes] = []
    old = new = 0
    at = i
    i += 1
    while i < len(lines):
        sign = lines[i][:1]
        if sign == b"\\":  # "\ No newline at end of file" is about the line before
            body[-1] = body[-1].rstrip(b"\n")
        elif (old, new) == (old_len, new_len) or sign not in (b" ", b"-", b"+"):
            break
        else:
            old += sign != b"+"
            new += sign != b"-"
            body.append(lines[i])
        i += 1
    if (old, new) != (old_len, new_len):
        raise _bad(
            name,
            first + at,
            f"a hunk with {old} old and {new} new lines",
            f"{old_len} old and {new_len} new lines, as its header says",
        )
    return i, Hunk(old_start, old_len, new_start, new_len, tuple(body))


def load_series(patch_dir: Path) -> list[Patch]:
    """Read `series` and every patch that it names, in order.

    Raises:
        PatchSetError: A name is repeated, missing, or a patch file isn't listed.

    """
    series = patch_dir / "series"
    if not series.is_file():
        raise PatchSetError("the patch series is missing", got=str(series))
    names: list[str] = []
    for line in series.read_text().splitlines():
        words = line.split("#")[0].split()
        if not words:
            continue
        if len(words) > 2 or words[1:] not in ([], ["-p1"]):
            raise PatchSetError(
                "patches/series: a line that isn't understood",
                got=line,
                allowed="a patch's file name, and -p1 at most",
            )
        names.append(words[0])
    present = {p.name for p in patch_dir.glob("*.patch")}
    missing = [n for n in names if n not in present]
    extra = sorted(present - set(names))
    twice = sorted({n for n in names if names.count(n) > 1})
    if missing or extra or twice:
        raise PatchSetError(
            "patches/series and the patch files don't agree",
            got=f"listed without a file: {missing or 'none'}; "
            f"not listed: {extra or 'none'}; listed twice: {twice or 'none'}",
            allowed="each *.patch file once",
        )
    return [parse_patch(n, (patch_dir / n).read_bytes()) for n in names]
