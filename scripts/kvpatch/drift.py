# SPDX-License-Identifier: Apache-2.0
"""What another vLLM would do to the patch set.

For each patch and file: clean (the pinned file), fits (every hunk at its line, in a
file that changed elsewhere), offset, conflict, already upstream or file gone. For each
shadowed file: moved or not. For each name of vLLM, FlashInfer and the CuTe DSL that the
overlay imports: still there, with the same signature. The exit status is 0 when the
set would apply as it is.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

from .errors import PatchSetError
from .fetch import fetch_any, fetch_release, sha256_of, unpack
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
from .place import CONFLICT, FITS, GONE, OFFSET, UPSTREAM, judge
from .state import sha256


class Report:
    """Prints findings and keeps what the verdict needs."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def line(self, word: str, text: str, detail: str = "") -> None:
        """Print one finding, with details on lines of their own."""
        self.words.append(word)
        print(f"  {word:<17} {text}")
        for more in detail.splitlines():
            print(f"{'':<20}{more}")

    def verdict(self) -> int:
        """Print the verdict; return the exit status."""
        by_hand = (CONFLICT, UPSTREAM, GONE, "MOVED", "GONE")
        hard = [w for w in self.words if w in by_hand]
        soft = [w for w in self.words if w in (OFFSET, "CHANGED", "new file")]
        anew = "move the pin, then scripts/export.sh --port writes the patches anew"
        if hard:
            print(f"verdict: needs work by hand, {len(hard)} place(s) named above")
        elif soft:
            print(f"verdict: needs review, {len(soft)} place(s); {anew}")
        elif FITS in self.words:
            print(f"verdict: every hunk is at its line, but files changed: {anew}")
        else:
            print("verdict: applies as it is; only the pin has to move")
        return 1 if hard or soft or FITS in self.words else 0


def drift_patches(ps: PatchSet, new: Reader, report: Report) -> None:
    """Judge every patch, later ones on what earlier ones leave."""
    files: dict[str, bytes | None] = {}
    missing: dict[str, list[str]] = {}
    for patch in ps.patches:
        for part in patch.files:
            data = files.get(part.path, new(part.path))
            verdict = judge(data, part, patch.name)
            files[part.path] = data if verdict.made is None else verdict.made
            detail = verdict.detail
            if without := missing.get(part.path):
                detail += "\njudged without " + ", ".join(without)
            if verdict.word == CONFLICT:
                missing.setdefault(part.path, []).append(patch.name)
            report.line(verdict.word, f"{patch.name}: {part.path}", detail.strip("\n"))


def drift_overlay(ps: PatchSet, new: Reader, report: Report) -> None:
    """Compare shadowed files, and look for overlay files that upstream has now."""
    for path, pinned in sorted(ps.pin.shadow.items()):
        data = new(path)
        if data is None:
            report.line("GONE", f"shadowed {path}", "take it out of [shadow]")
        elif sha256(data) == pinned:
            report.line("same", f"shadowed {path}")
        else:
            report.line(
                "MOVED",
                f"shadowed {path}",
                "read what changed in it, bring over what we need, then put into "
                f'UPSTREAM.toml [shadow]:\n"{path}" = "{sha256(data)}"',
            )
    for path in sorted(set(ps.overlay) - set(ps.pin.shadow)):
        if (data := new(path)) is not None:
            todo = f'rename ours, or list it in [shadow]:\n"{path}" = "{sha256(data)}"'
            report.line("new file", f"upstream has {path} now", todo)


@dataclass
class _Finding:
    """One change of a name, however many imports lead to it.

    Attributes:
        users: Overlay files that import it, or what leads to it, and name it.
        through: The modules that those import from.
        naming: Overlay files that name it.
        others: Modules that the remaining imports read.

    """

    users: set[str] = field(default_factory=set)
    through: set[str] = field(default_factory=set)
    naming: set[str] = field(default_factory=set)
    others: set[str] = field(default_factory=set)

    @property
    def module(self) -> str:
        """The module to show."""
        return min(self.through or self.others)


def drift_names(ps: PatchSet, old: Reader, new: Reader, report: Report) -> int:
    """Compare every name that the overlay imports from vLLM; return how many.

    A member that several imports lead to is reported once, with the files that both
    import it and name it.

    """
    uses = overlay_uses(ps, ps.pin.project)
    words = {
        path: overlay_uses(replace(ps, overlay={path: file}), ps.pin.project).words
        for path, file in ps.overlay.items()
    }
    ours = {f.path for patch in ps.patches for f in patch.files}
    found: dict[tuple[str, str, str | None], _Finding] = {}
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
        if not after:
            users = ", ".join(sorted(set(where)))
            report.line("GONE", shown, f"used by {users}")
            continue
        for part, signature in before.items():
            if (now := after.get(part)) == signature:
                continue
            member = part.partition(".")[2]
            everybody = not member or member == "__init__"
            naming = {p for p in words if everybody or member in words[p]}
            finding = found.setdefault((part, signature, now), _Finding())
            finding.naming |= naming
            if used := naming & set(where):
                finding.users |= used
                finding.through.add(module)
            else:
                finding.others.add(module)
    _report_names(found, report)
    return count


def _report_names(
    found: dict[tuple[str, str, str | None], _Finding], report: Report
) -> None:
    for (part, signature, now), finding in sorted(
        found.items(), key=lambda item: (item[1].module, item[0][0])
    ):
        users = ", ".join(sorted(finding.users or finding.naming))
        # A value may reach a file without its class being imported there.
        verb = "used by" if finding.users else "named, not imported, by"
        report.line(
            "GONE" if now is None else "CHANGED",
            f"{finding.module}: {part}",
            f"{signature}  ->  {now}\n{verb} {users}",
        )


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
            archive = fetch_any(ps.pin.project, args.to)
            print(f"{archive}\n  sha256 {sha256_of(archive)}")
            unpack(archive, other)
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
