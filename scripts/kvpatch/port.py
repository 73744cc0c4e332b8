# SPDX-License-Identifier: Apache-2.0
"""Place every patch anew on the pinned release, and write it with new blob ids.

For a pin that moved, a patch that was dropped, or one that was edited by hand: the
patches' own ids needn't hold. A hunk goes where its exact lines stand, once, and never
over a line that differs. Nothing is written while one patch doesn't fit: its file then
lies in `build/port/PATCH/after/` with marker lines around what to check, beside
`before/` to compare, and the next run takes what a person made of it.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path

from .drift import Report, drift_overlay
from .errors import PatchSetError
from .mailpatch import FilePatch, Patch, parse_patch
from .patchset import PatchSet, patched_bytes
from .place import CONFLICT, GONE, UPSTREAM, Verdict, judge, marked, marker_line
from .render import render
from .transact import read_or_none

RESOLVED, WAITS = "resolved", "waits"
Files = dict[str, bytes]


def port_folder(ps: PatchSet) -> Path:
    """Return where conflicts lie for a person to resolve."""
    return ps.root / "build" / "port"


@dataclass
class Placed:
    """What came of placing the series.

    Attributes:
        pieces: Patch -> (path, bytes before, bytes after) of each of its files.
        offers: Files to lay down for a person: path below build/port -> bytes.
        used: Files below build/port that were taken.
        faults: What keeps the series from being written.
        stuck: Path -> the patch that later ones on it wait for.

    """

    pieces: dict[str, list[tuple[str, bytes, bytes]]] = field(default_factory=dict)
    offers: Files = field(default_factory=dict)
    used: list[Path] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    stuck: dict[str, str] = field(default_factory=dict)


def place_series(ps: PatchSet, stock: Files, report: Report) -> Placed:
    """Place every patch, each on what the ones before leave; write nothing.

    Args:
        ps: The set, its blob ids not yet checked.
        stock: The pinned release's files.
        report: Told how each patch fares on each file.

    """
    placed, files = Placed(), dict(stock)
    for patch in ps.patches:
        placed.pieces[patch.name] = []
        for part in patch.files:
            shown = f"{patch.name}: {part.path}"
            if part.path in placed.stuck:
                report.line(WAITS, shown, f"for {placed.stuck[part.path]}")
                continue
            before = files.get(part.path)
            verdict = judge(before, part, patch.name)
            if verdict.word == CONFLICT and before is not None:
                verdict = _take_resolved(ps, placed, patch, part, before, verdict)
            report.line(verdict.word, shown, verdict.detail)
            if verdict.word in (CONFLICT, GONE, UPSTREAM):
                placed.stuck[part.path] = patch.name
                placed.faults.append(f"{shown}: {verdict.word}")
            elif before is not None and verdict.made is not None:
                files[part.path] = verdict.made
                if verdict.made != before:
                    piece = (part.path, before, verdict.made)
                    placed.pieces[patch.name].append(piece)
        if not placed.pieces[patch.name] and not any(
            part.path in placed.stuck for part in patch.files
        ):
            placed.faults.append(f"{patch.name}: no change is left, so drop it")
    return placed


def _take_resolved(
    ps: PatchSet,
    placed: Placed,
    patch: Patch,
    part: FilePatch,
    before: bytes,
    conflict: Verdict,
) -> Verdict:
    """Take what a person made of a conflict, or note what to lay down for one."""
    folder = port_folder(ps) / patch.name
    based, made = (folder / side / part.path for side in ("before", "after"))
    mine = read_or_none(made)
    shown = made.relative_to(ps.root)
    if mine is None:
        for path, data in ((based, before), (made, marked(before, part, patch.name))):
            placed.offers[path.relative_to(ps.root).as_posix()] = data
        return Verdict(CONFLICT, f"{conflict.detail}\nresolve it in {shown}")
    if read_or_none(based) != before:
        todo = f"{shown} was made for another state: move it away and run again"
        return Verdict(CONFLICT, f"{conflict.detail}\n{todo}")
    if (line := marker_line(mine)) is not None:
        todo = f"{shown}, line {line}, holds a conflict marker"
        return Verdict(CONFLICT, f"{conflict.detail}\n{todo}")
    placed.used += [based, made]
    gone = "; this patch no longer changes the file" if mine == before else ""
    return Verdict(RESOLVED, f"from {shown}{gone}", mine)


def render_series(ps: PatchSet, placed: Placed, stock: Files) -> Files:
    """Return the patch files that change: name -> bytes.

    Raises:
        PatchSetError: What was rendered doesn't give the files that were placed.

    """
    written, parsed = {}, []
    want = {p: after for parts in placed.pieces.values() for p, _, after in parts}
    for patch in ps.patches:
        made = render(patch.header, placed.pieces[patch.name])
        parsed.append(parse_patch(patch.name, made))
        if made != (ps.root / "patches" / patch.name).read_bytes():
            written[patch.name] = made
    again = PatchSet(ps.root, ps.pin, tuple(parsed), ps.overlay)
    for path, parts in again.edits.items():
        if patched_bytes(stock[path], parts) != want[path]:
            raise PatchSetError("the series as written gives another file", got=path)
    return written


def port(ps: PatchSet, stock: Files) -> tuple[Files, list[Path]]:
    """Place the series on the pinned release.

    Args:
        ps: The set, loaded with `chained=False`.
        stock: The pinned release's files.

    Returns:
        The patch files to write, and the files below build/port that they replace.

    Raises:
        PatchSetError: A patch doesn't fit. patches/ stands as before, and what to
            resolve lies in build/port.

    """
    report = Report()
    print(f"the patches on {ps.pin.project} {ps.pin.version}")
    placed = place_series(ps, stock, report)
    print("overlay")
    drift_overlay(ps, stock.get, report)
    if placed.faults:
        for path, data in placed.offers.items():
            (ps.root / path).parent.mkdir(parents=True, exist_ok=True)
            (ps.root / path).write_bytes(data)
        raise PatchSetError(
            "the series doesn't fit the pinned release; patches/ is unchanged",
            got="\n".join(placed.faults),
            todo="CONFLICT: edit the file named above, without markers, and run "
            "again\nother words: take that file's part out of the patch by hand, or "
            "drop the patch,\nand run again (patches/README.md)",
        )
    if any(word in ("MOVED", "GONE", "new file") for word in report.words):
        print("still to do by hand: the overlay's files named above")
    return render_series(ps, placed, stock), placed.used


def forget(ps: PatchSet, used: list[Path]) -> None:
    """Remove resolved conflicts that patches/ holds now; name what is left."""
    folder = port_folder(ps)
    for path in used:
        path.unlink()
    left = [p for p in sorted(folder.rglob("*")) if p.is_file()]
    for path in left:
        if "after" in path.relative_to(folder).parts:
            print(f"not needed, left alone: {path.relative_to(ps.root)}")
    if not left:
        shutil.rmtree(folder, ignore_errors=True)
