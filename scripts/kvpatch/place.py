# SPDX-License-Identifier: Apache-2.0
"""Where a patch's hunks stand in another version of their file.

A hunk fits where its exact lines stand, however far from the line it names: no line is
ever ignored. What fits nowhere is merged between marker lines, for a person to check.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from .mailpatch import (
    FilePatch,
    Hunk,
    HunkError,
    apply_file,
    blob_id,
    same_blob,
    show_line,
    split_lines,
)
from .merge import merge

CLEAN, FITS, OFFSET, CONFLICT, UPSTREAM, GONE = (
    "clean",
    "fits",
    "offset",
    "CONFLICT",
    "already upstream",
    "FILE GONE",
)
_OPEN, _BASE, _CLOSE = b"<<<<<<< ", b"||||||| ", b">>>>>>> "


@dataclass(frozen=True)
class Spot:
    """One hunk's place in a file.

    Attributes:
        number: 1-based number of the hunk in its file.
        hunk: The hunk.
        fits: Whether its exact lines stand there.
        expected: 0-based line that the hunk names.
        at: 0-based line where it stands, or where most of its lines do.
        end: 0-based line after it.
        places: Every 0-based line where its exact lines stand.

    """

    number: int
    hunk: Hunk
    fits: bool
    expected: int
    at: int
    end: int
    places: tuple[int, ...] = ()

    @property
    def sure(self) -> bool:
        """Its lines stand here and nowhere else."""
        return len(self.places) == 1


@dataclass(frozen=True)
class Verdict:
    """How one file's part of a patch fares on another version.

    Attributes:
        word: One of the words above.
        detail: What to look at, on lines of its own; or nothing.
        made: The edited bytes; None where the patch doesn't fit.

    """

    word: str
    detail: str = ""
    made: bytes | None = None


def _stands(lines: list[bytes], block: list[bytes], least: int) -> list[int]:
    """Return every 0-based line from `least` on where `block` stands."""
    last = len(lines) - len(block)
    return [
        i
        for i in range(least, last + 1)
        if lines[i] == block[0] and lines[i : i + len(block)] == block
    ]


def _likeliest(
    lines: list[bytes], block: list[bytes], near: int, least: int, most: int
) -> int:
    """Return the 0-based line at which most of a block's lines stand."""
    where: dict[bytes, list[int]] = {}
    for j, line in enumerate(block):
        if line.strip():
            where.setdefault(line, []).append(j)
    votes: Counter[int] = Counter()
    for i in range(least, most):
        for j in where.get(lines[i], []):
            votes[min(max(i - j, least), most)] += 1
    if not votes:
        return min(max(near, least), most)
    return min(votes, key=lambda at: (-votes[at], abs(at - near), at))


def place(lines: list[bytes], part: FilePatch, reverse: bool = False) -> list[Spot]:
    """Return each hunk's place, in their order and without overlap.

    Args:
        lines: The file.
        part: The edits.
        reverse: Look for the hunks' results instead.

    """
    spots: list[Spot] = []
    done = shift = 0
    for number, hunk in enumerate(part.hunks, 1):
        want = hunk.side(reverse, before=True)
        start = hunk.new_start if reverse else hunk.old_start
        # With no old lines, the number names the line before the insertion.
        expected = start - 1 if want else start
        near = expected + shift
        found = _stands(lines, want, done) if want else [near] * (near <= len(lines))
        if not found:
            spots.append(Spot(number, hunk, False, expected, near, near))
            continue
        at = min(found, key=lambda i: (abs(i - near), i))
        done, shift = at + len(want), at - expected
        spots.append(Spot(number, hunk, True, expected, at, done, tuple(found)))
    return _place_lost(lines, spots, reverse)


def _place_lost(lines: list[bytes], spots: list[Spot], reverse: bool) -> list[Spot]:
    """Put the hunks that fit nowhere between the ones that do."""
    made: list[Spot] = []
    for i, spot in enumerate(spots):
        if not spot.fits:
            least = made[-1].end if made else 0
            most = next((s.at for s in spots[i:] if s.fits), len(lines))
            want = spot.hunk.side(reverse, before=True)
            at = _likeliest(lines, want, spot.at, least, most)
            end = min(at + len(want), most)
            spot = Spot(spot.number, spot.hunk, False, spot.expected, at, end)
        made.append(spot)
    return made


def apply_anywhere(
    data: bytes, part: FilePatch, reverse: bool = False
) -> tuple[bytes | None, list[str]]:
    """Apply hunks wherever their exact lines stand.

    Args:
        data: The file.
        part: The edits.
        reverse: Undo instead.

    Returns:
        The result, or None where a hunk's lines stand nowhere; and a note for each
        hunk that isn't at its place.

    """
    lines = split_lines(data)
    spots = place(lines, part, reverse)
    notes = [
        _note(lines, s, reverse) for s in spots if not s.fits or s.at != s.expected
    ]
    if not all(s.fits for s in spots):
        return None, notes
    return _joined(lines, spots, reverse), notes


def _note(lines: list[bytes], spot: Spot, reverse: bool) -> str:
    """Say where a hunk went, or what is there instead of its lines."""
    if spot.fits:
        return f"hunk {spot.number}: line {spot.expected + 1} -> {spot.at + 1}"
    want = spot.hunk.side(reverse, before=True)
    got = lines[spot.at : spot.at + len(want)]
    bad = next((i for i, w in enumerate(want) if i >= len(got) or got[i] != w), 0)
    return (
        f"hunk {spot.number} (line {spot.expected + 1}): its lines stand nowhere\n"
        f"  wanted: line {spot.expected + bad + 1}: {show_line(want, bad)}\n"
        f"  found:  line {spot.at + bad + 1}: {show_line(got, bad)}"
    )


def _joined(lines: list[bytes], spots: list[Spot], reverse: bool) -> bytes:
    """Return the file with every hunk applied at its place."""
    out: list[bytes] = []
    done = 0
    for spot in spots:
        out += lines[done : spot.at] + spot.hunk.side(reverse, before=False)
        done = spot.end
    return b"".join(out + lines[done:])


def _ended(lines: list[bytes]) -> bytes:
    data = b"".join(lines)
    return data if not data or data.endswith(b"\n") else data + b"\n"


def marked(data: bytes, part: FilePatch, name: str) -> bytes:
    """Return a file with the hunks that fit, and the others to be resolved.

    A hunk that fits nowhere is merged with the lines where most of its own stand, one
    that fits in several places stands at the nearest. Marker lines are around both,
    even where nothing conflicts: a person must look.

    Args:
        data: The file.
        part: The edits.
        name: The patch, for the markers.

    """
    lines = split_lines(data)
    out, done = [], 0
    for spot in place(lines, part):
        out.append(b"".join(lines[done : spot.at]))
        new = spot.hunk.side(reverse=False, before=False)
        if spot.sure:
            out.append(b"".join(new))
        else:
            label = f"{name}, hunk {spot.number}"
            there = _ended(lines[spot.at : spot.end])
            base = _ended(spot.hunk.side(reverse=False, before=True))
            labels = ("what stands there", "what the hunk expects", label)
            made, clean = merge(there, base, _ended(new), labels)
            if clean:
                todo = f"{label}: check the merge, then delete both marker lines\n"
                made = _OPEN + todo.encode() + made + _CLOSE + label.encode() + b"\n"
            if out[-1] and not out[-1].endswith(b"\n"):
                made = b"\n" + made
            out.append(made)
        done = spot.end
    return b"".join([*out, *lines[done:]])


def marker_line(data: bytes) -> int | None:
    """Return the 1-based line of the first conflict marker, or None."""
    for number, line in enumerate(split_lines(data), 1):
        if line.startswith((_OPEN, _BASE, _CLOSE)):
            return number
    return None


def judge(data: bytes | None, part: FilePatch, name: str) -> Verdict:
    """Judge one file's edits on another version of it.

    Args:
        data: The file, None where it isn't there.
        part: The edits.
        name: The patch, for error messages.

    """
    if data is None:
        return Verdict(GONE, "take its part out of the patch, or drop the patch")
    try:
        made = apply_file(data, part, name)
        if same_blob(blob_id(data), part.old_blob):
            return Verdict(CLEAN, "", made)
    except HunkError:
        pass
    moved, notes = apply_anywhere(data, part)
    if moved is None and apply_anywhere(data, part, reverse=True)[0] is not None:
        todo = "take its part out of the patch, or drop the patch"
        return Verdict(UPSTREAM, todo, data)
    notes = [note for note in notes if moved is not None or "nowhere" in note]
    twins = [s for s in place(split_lines(data), part) if len(s.places) > 1]
    for spot in twins:
        where = ", ".join(str(at + 1) for at in spot.places)
        notes.append(f"hunk {spot.number}: its lines stand more than once: {where}")
    if moved is None or twins:
        return Verdict(CONFLICT, "\n".join(notes))
    if notes:
        return Verdict(OFFSET, "; ".join(notes), moved)
    return Verdict(FITS, "at its lines, in a file that changed elsewhere", moved)
