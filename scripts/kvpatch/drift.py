# SPDX-License-Identifier: Apache-2.0
"""What another vLLM would do to the patch set.

For each patch: clean, offset, conflict, already upstream or file gone. For each
shadowed file: moved or not. For each name of vLLM, FlashInfer and the CuTe DSL that the
overlay imports: still there, with the same signature. The exit status is 0 when the
set would apply as it is.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

from .errors import PatchSetError
from .fetch import fetch_any, fetch_release, unpack
from .mailpatch import FilePatch, HunkError, apply_file, split_lines
from .names import (
    COMPILED,
    PINNED_BY,
    Reader,
    describe,
    installed_reader,
    module_file,
    overlay_uses,
    requirement,
)
from .patchset import PatchSet, load_patch_set
from .state import sha256

CLEAN, OFFSET, CONFLICT, UPSTREAM, GONE = (
    "clean",
    "offset",
    "CONFLICT",
    "already upstream",
    "FILE GONE",
)


@dataclass
class Verdict:
    """How one file's part of a patch fares."""

    word: str
    detail: str = ""


def _place(lines: list[bytes], block: list[bytes], near: int, least: int) -> int | None:
    spots = [
        i
        for i in range(least, len(lines) - len(block) + 1)
        if lines[i : i + len(block)] == block
    ]
    return min(spots, key=lambda i: abs(i - near)) if spots else None


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
    lines, out, done, shift = split_lines(data), [], 0, 0
    notes, lost = [], False
    for number, hunk in enumerate(part.hunks, 1):
        want = hunk.side(reverse, before=True)
        start = hunk.new_start if reverse else hunk.old_start
        expected = start - 1 if want else start
        at = _place(lines, want, expected + shift, done) if want else expected + shift
        if at is None or at > len(lines):
            notes.append(f"hunk {number} (line {start}): its lines stand nowhere")
            lost = True
            continue
        if at != expected:
            notes.append(f"hunk {number}: line {expected + 1} -> {at + 1}")
        shift = at - expected
        out += lines[done:at] + hunk.side(reverse, before=False)
        done = at + len(want)
    return (None if lost else b"".join(out + lines[done:])), notes


def judge(data: bytes | None, part: FilePatch, name: str) -> tuple[Verdict, bytes]:
    """Judge one file's edits on another version; return the edited bytes too."""
    if data is None:
        return Verdict(GONE), b""
    try:
        return Verdict(CLEAN), apply_file(data, part, name)
    except HunkError:
        pass
    made, notes = apply_anywhere(data, part)
    if made is not None:
        return Verdict(OFFSET, "; ".join(notes)), made
    undone, _ = apply_anywhere(data, part, reverse=True)
    if undone is not None:
        return Verdict(UPSTREAM), data
    bad = [n for n in notes if "nowhere" in n]
    return Verdict(CONFLICT, "; ".join(bad)), data


class Report:
    """Prints findings and keeps what the verdict needs."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def line(self, word: str, text: str, detail: str = "") -> None:
        """Print one finding."""
        self.words.append(word)
        print(f"  {word:<17} {text}" + (f"\n{'':<20}{detail}" if detail else ""))

    def verdict(self) -> int:
        """Print the verdict; return the exit status."""
        hard = [w for w in self.words if w in (CONFLICT, GONE, "MOVED", "GONE")]
        soft = [w for w in self.words if w in (OFFSET, UPSTREAM, "CHANGED", "new file")]
        if hard:
            print(f"verdict: needs work by hand, {len(hard)} place(s) named above")
        elif soft:
            print(
                f"verdict: needs review, {len(soft)} place(s); scripts/export.sh "
                "then writes the patches anew"
            )
        else:
            print("verdict: applies as it is; only the pin has to move")
        return 1 if hard or soft else 0


def drift_patches(ps: PatchSet, new: Reader, report: Report) -> None:
    """Judge every patch, later ones on what earlier ones leave."""
    files: dict[str, bytes | None] = {}
    for patch in ps.patches:
        for part in patch.files:
            data = files.get(part.path, new(part.path))
            verdict, made = judge(data, part, patch.name)
            files[part.path] = made if verdict.word != GONE else None
            report.line(verdict.word, f"{patch.name}: {part.path}", verdict.detail)


def drift_overlay(ps: PatchSet, new: Reader, report: Report) -> None:
    """Compare shadowed files, and look for overlay files that upstream has now."""
    for path, pinned in sorted(ps.pin.shadow.items()):
        data = new(path)
        if data is None:
            report.line("GONE", f"shadowed {path}")
        else:
            moved = sha256(data) != pinned
            report.line("MOVED" if moved else "same", f"shadowed {path}")
    for path in sorted(set(ps.overlay) - set(ps.pin.shadow)):
        if new(path) is not None:
            report.line("new file", f"upstream has {path} now")


def drift_names(ps: PatchSet, old: Reader, new: Reader, report: Report) -> int:
    """Compare every name that the overlay imports from vLLM; return how many."""
    uses = overlay_uses(ps, ps.pin.project)
    ours = {p for patch in ps.patches for f in patch.files for p in (f.path,)}
    count = 0
    for (module, name), where in sorted(uses.imports.items()):
        if module.split(".")[0] != ps.pin.project:
            continue
        before = describe(old, module, name, uses.words)
        after = describe(new, module, name, uses.words)
        shown = f"{module}.{name}" if name else module
        if not before:
            if module.replace(".", "/") + ".py" not in ours:
                report.line("UNKNOWN", f"{shown}: not in the pinned release either")
            continue
        count += 1
        users = ", ".join(sorted(set(where)))
        if not after:
            report.line("GONE", shown, f"used by {users}")
            continue
        for part, signature in before.items():
            now = after.get(part)
            if now == signature:
                continue
            word = "GONE" if now is None else "CHANGED"
            detail = f"{signature}  ->  {now}\n{'':<20}used by {users}"
            report.line(word, f"{module}: {part}", detail)
    return count


def drift_libraries(ps: PatchSet, old: Reader, new: Reader, report: Report) -> None:
    """Compare the pins of the kernel libraries, and their names where installed."""
    uses = overlay_uses(ps, ps.pin.project)
    roots = sorted({m.split(".")[0] for m, _ in uses.imports} - {ps.pin.project})
    for root in roots:
        package = PINNED_BY.get(root)
        if package:
            before, after = requirement(old, package), requirement(new, package)
            same = before == after
            text = before if same else f"{before} -> {after}"
            report.line("same" if same else "CHANGED", f"pin {text}")
        read = installed_reader(root)
        wanted = sorted({(m, n) for m, n in uses.imports if m.split(".")[0] == root})
        if read is None:
            print(f"  {'not checked':<17} {len(wanted)} names: {root} isn't installed")
            continue
        for module, name in wanted:
            source = module_file(read, module)
            if source is not None and source[1] == COMPILED:
                print(f"  {'not checked':<17} {module}.{name}: no source")
            elif not describe(read, module, name, set()):
                report.line("GONE", f"{module}.{name} (installed {root})")


def main(argv: list[str]) -> int:
    """Run scripts/drift.sh; return its exit status."""
    made = argparse.ArgumentParser(
        prog="scripts/drift.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "--to", required=True, metavar="VERSION|PATH", help="a version, or a tree"
    )
    made.add_argument("--sdist", type=Path, help="the pinned release, if it's here")
    made.add_argument("--project", type=Path, help=argparse.SUPPRESS)
    args = made.parse_args(argv)
    ps = load_patch_set(args.project or Path(__file__).resolve().parents[2])
    with tempfile.TemporaryDirectory(prefix="kvpatch-drift-") as tmp:
        base = Path(tmp) / "pinned"
        unpack(fetch_release(ps.pin, given=args.sdist), base)
        if "/" in args.to or Path(args.to).exists():
            other = Path(args.to)
            if not (other / ps.pin.project).is_dir():
                raise PatchSetError(
                    "--to names no tree",
                    got=str(other),
                    allowed=f"a version, or a folder that holds {ps.pin.project}/",
                )
        else:
            other = Path(tmp) / "other"
            unpack(fetch_any(ps.pin.project, args.to), other)
        return _compare(ps, base, other, args.to)


def _compare(ps: PatchSet, base: Path, other: Path, label: str) -> int:
    from .verify import reader

    old, new, report = reader(base), reader(other), Report()
    print(f"{ps.pin.project} {ps.pin.version} -> {label}")
    print("patches")
    drift_patches(ps, new, report)
    print("overlay")
    drift_overlay(ps, new, report)
    print("names")
    count = drift_names(ps, old, new, report)
    print(f"  {count} imports from {ps.pin.project} compared")
    drift_libraries(ps, old, new, report)
    return report.verdict()
