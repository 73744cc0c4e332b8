# SPDX-License-Identifier: Apache-2.0
"""Write edits of the patched tree back to patches/ and vllm_overlay/.

Edits of a file that patches touch go to the last of them, or to the one named with
--patch, through every patch after it. New files of the tree go to the overlay. The
same tree gives the same bytes. Nothing is written unless everything can be.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from . import apply as front
from .cli_apply import default_tree
from .errors import PatchSetError
from .fetch import fetch_release
from .mailpatch import Patch
from .patchset import JUNK_DIRS, JUNK_ENDS, PatchSet, load_patch_set, patched_bytes
from .render import render, rerender
from .state import sha256
from .target import Target, check_version, git, open_tree
from .transact import STATE_DIR, read_json, read_or_none

NEW_HEADER = """\
From: KV-balanced MLA contributors <kv-balanced-mla@localhost>
Subject: [PATCH] {subject}

TODO: why this can't live in the overlay, and what it does to other models.

Kind: TODO
Forwarded: no
Remove-When: TODO
Test: TODO
---
"""


@dataclass
class Edits:
    """What differs between a tree and the state that was applied to it.

    Attributes:
        patched: Upstream file -> its new bytes.
        overlay: Overlay file -> its new bytes, None where it was removed.
        strange: New files that nobody asked to export.

    """

    patched: dict[str, bytes] = field(default_factory=dict)
    overlay: dict[str, bytes | None] = field(default_factory=dict)
    strange: list[str] = field(default_factory=list)


def read_stock(ps: PatchSet, sdist: Path) -> dict[str, bytes]:
    """Return every file of the source release."""
    files = {}
    with tarfile.open(sdist) as tar:
        for member in tar:
            if member.isfile() and (data := tar.extractfile(member)):
                files[member.name.partition("/")[2]] = data.read()
    return files


def tree_files(root: Path) -> list[str]:
    """Return a tree's files, without what tools leave behind."""
    found = []
    for folder, dirs, files in os.walk(root):
        dirs[:] = [d for d in dirs if d not in {*JUNK_DIRS, STATE_DIR, ".git"}]
        for name in files:
            if not name.endswith(JUNK_ENDS):
                found.append((Path(folder) / name).relative_to(root).as_posix())
    return sorted(found)


def find_edits(
    target: Target, ps: PatchSet, stock: dict[str, bytes], add: list[str]
) -> Edits:
    """Compare a tree with what was applied to it.

    Args:
        target: The tree.
        ps: The set as it is now.
        stock: Upstream's files.
        add: New files to take into the overlay wherever they lie.

    Raises:
        PatchSetError: A file was edited both here and in the tree, an upstream file
            was deleted, or the tree was never patched.

    """
    record = read_json(target.root / STATE_DIR / "record.json")
    if record is None:
        raise PatchSetError(
            "the tree isn't patched, so edits can't be told from it",
            got=str(target.root),
            todo="scripts/apply.sh, then edit, then export",
        )
    base = {path: note["result"] for path, note in record["files"].items()}
    want = {p: patched_bytes(stock[p], parts) for p, parts in ps.edits.items()}
    want |= {p: f.data for p, f in ps.overlay.items()}
    homes = {str(Path(p).parent) for p in ps.overlay if p not in stock}
    edits, both = Edits(), []
    present = set(tree_files(target.root))
    for path in sorted({*present, *base, *stock}):
        now = read_or_none(target.root / path) if path in present else None
        was = base.get(path) or (sha256(stock[path]) if path in stock else None)
        if (None if now is None else sha256(now)) == was:
            continue
        ours = want.get(path, stock.get(path))
        if now == ours:
            continue
        if path in base and (ours is None or sha256(ours) != was):
            both.append(path)
        elif path in stock and path not in ps.pin.shadow:
            if now is None:
                raise PatchSetError("a patch can't delete a file", got=path)
            edits.patched[path] = now
        elif path in base or str(Path(path).parent) in homes or path in add:
            edits.overlay[path] = now
        elif now is not None:
            edits.strange.append(path)
    if both:
        raise PatchSetError(
            "files were edited in the tree and in this project since it was applied",
            got="\n".join(both),
            todo="keep one side: restore it in the tree or here, then export again",
        )
    return edits


def _merge(mine: bytes, base: bytes, edited: bytes) -> bytes | None:
    """Return `mine` with the change from base to edited; None on a conflict."""
    with tempfile.TemporaryDirectory() as tmp:
        names = []
        for i, data in enumerate((mine, base, edited)):
            names.append(Path(tmp) / str(i))
            names[-1].write_bytes(data)
        ran = subprocess.run(["git", "merge-file", "-p", *names], capture_output=True)
    return ran.stdout if ran.returncode == 0 else None


def new_states(
    path: str, stock: bytes, ps: PatchSet, name: str, final: bytes
) -> list[bytes]:
    """Return a file's bytes after each of its patches, with an edit put into one.

    Args:
        path: The file.
        stock: Upstream's bytes.
        ps: The set.
        name: The patch that takes the edit.
        final: The edited bytes.

    Raises:
        PatchSetError: The edit overlaps with a later patch.

    """
    parts = ps.edits[path]
    states = [patched_bytes(stock, parts, i) for i in range(len(parts) + 1)]
    first = next(i for i, (p, _) in enumerate(parts) if p.name == name)
    result = states[1 : first + 1]
    for i in range(first, len(parts)):
        last = i == len(parts) - 1
        made = final if last else _merge(states[i + 1], states[-1], final)
        if made is None:
            raise PatchSetError(
                f"the edit of {path} overlaps with {parts[i + 1][0].name}",
                todo=f"export it there: --patch {parts[-1][0].name}",
            )
        result.append(made)
    for i, (before, after) in enumerate(zip([stock, *result], result)):
        if before == after:
            raise PatchSetError(
                f"{parts[i][0].name} would no longer change {path}",
                todo="drop the patch, or that file from it: see patches/README.md",
            )
    return result


def plan_patches(
    ps: PatchSet,
    edits: Edits,
    stock: dict[str, bytes],
    chosen: str | None,
    new: Patch | None,
) -> dict[str, bytes]:
    """Return the patch files to write: name -> bytes.

    Raises:
        PatchSetError: A file belongs to no patch and none was named, or an edit
            doesn't fit into its patch.

    """
    states: dict[str, list[bytes]] = {}
    extra: dict[str, bytes] = {}
    lost = []
    for path, final in edits.patched.items():
        names = [p.name for p, _ in ps.edits.get(path, [])]
        if new is not None or (chosen is not None and chosen not in names):
            extra[path] = final
        elif names:
            name = chosen or names[-1]
            states[path] = new_states(path, stock[path], ps, name, final)
        else:
            lost.append(path)
    if lost:
        raise PatchSetError(
            "no patch touches these edited files",
            got="\n".join(lost),
            todo="say which takes them: --patch NAME, or --new NAME --subject TEXT",
        )
    touched = {p.name for path in states for p, _ in ps.edits[path]}
    if chosen and extra:
        touched.add(chosen)
    written = {}
    for patch in ps.patches:
        if patch.name not in touched:
            continue
        pieces = []
        for part in patch.files:
            at = [p.name for p, _ in ps.edits[part.path]].index(patch.name)
            chain = states.get(part.path) or [
                patched_bytes(stock[part.path], ps.edits[part.path], i + 1)
                for i in range(len(ps.edits[part.path]))
            ]
            before = ([stock[part.path], *chain])[at]
            pieces.append((part.path, before, chain[at]))
        if patch.name == chosen:
            pieces += [_extra(ps, stock, path, final) for path, final in extra.items()]
        written[patch.name] = render(patch.header, pieces)
    if new is not None:
        pieces = [_extra(ps, stock, path, final) for path, final in extra.items()]
        written[new.name] = render(new.header, pieces)
    return written


def _extra(
    ps: PatchSet, stock: dict[str, bytes], path: str, final: bytes
) -> tuple[str, bytes, bytes]:
    """An edit on top of everything: of a file that this patch didn't touch so far."""
    return path, patched_bytes(stock[path], ps.edits.get(path, [])), final


def rewrite(ps: PatchSet, stock: dict[str, bytes]) -> dict[str, bytes]:
    """Return every patch in the form that export writes, where it isn't yet."""
    both = {p.name: rerender(ps, p, stock) for p in ps.patches}
    return {name: made for name, (kept, made) in both.items() if kept != made}


def _write(path: Path, data: bytes | None) -> None:
    if data is None:
        path.unlink()
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = path.with_name(path.name + ".new~")
    tmp.write_bytes(data)
    if path.exists():
        tmp.chmod(path.stat().st_mode)
    os.replace(tmp, path)


def _refuse_mixture(paths: list[str]) -> None:
    if len({p.partition("/")[0] for p in paths}) > 1:
        raise PatchSetError(
            "one commit can't hold patches and overlay; nothing was written",
            got="\n".join(paths),
            todo="--only overlay first, then --only patches",
        )


def _commit(ps: PatchSet, message: str, paths: list[str]) -> None:
    for words in (["add", "--", *paths], ["commit", "-q", "-m", message, "--", *paths]):
        ran = git(ps.root, *words)
        if ran.returncode:
            raise PatchSetError("git refused the commit", got=ran.stderr.strip())
    print("committed: " + message)


def parser() -> argparse.ArgumentParser:
    """Return the parser of scripts/export.sh."""
    made = argparse.ArgumentParser(
        prog="scripts/export.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("tree", nargs="?", type=Path, help="default: build/vllm")
    made.add_argument("--patch", metavar="NAME", help="the patch that takes the edits")
    made.add_argument("--new", metavar="NAME", help="put them into a new patch")
    made.add_argument("--subject", help="the new patch's `area: what`")
    made.add_argument(
        "--add", action="append", default=[], metavar="PATH", help="new overlay file"
    )
    made.add_argument("--only", choices=("patches", "overlay"), help="write one half")
    made.add_argument("--commit", metavar="MESSAGE", help="commit what was written")
    made.add_argument(
        "--rewrite", action="store_true", help="only bring the patches into form"
    )
    made.add_argument("--sdist", type=Path, help="the source release, if it's here")
    made.add_argument("--project", type=Path, help=argparse.SUPPRESS)
    return made


def main(argv: list[str]) -> int:
    """Run scripts/export.sh; return its exit status."""
    made = parser()
    args = made.parse_args(argv)
    if bool(args.new) != bool(args.subject) or (args.new and args.patch):
        made.error("--new goes with --subject, and not with --patch")
    ps = load_patch_set(args.project or Path(__file__).resolve().parents[2])
    names = [p.name for p in ps.patches]
    if args.patch and args.patch not in names:
        made.error(f"there is no patch {args.patch}; there are: {', '.join(names)}")
    if args.new and (args.new in names or not args.new.endswith(".patch")):
        made.error(f"{args.new} can't be a new patch: taken, or not NAME.patch")
    stock = read_stock(ps, fetch_release(ps.pin, given=args.sdist))
    if args.rewrite:
        return _finish(ps, rewrite(ps, stock), {}, args, None)
    target = open_tree(args.tree or default_tree(ps), ps.pin)
    check_version(target, ps.pin)
    edits = find_edits(target, ps, stock, args.add)
    if args.only == "overlay":
        edits.patched = {}
    elif args.only == "patches":
        edits.overlay = {}
    new = None
    if args.new:
        header = NEW_HEADER.format(subject=args.subject)
        new = Patch(args.new, header, args.subject, "", {}, (), "")
        if not edits.patched:
            made.error("there are no edits of upstream files for a new patch")
    written = plan_patches(ps, edits, stock, args.patch, new)
    return _finish(ps, written, edits.overlay, args, (target, edits.strange))


def _finish(
    ps: PatchSet,
    patches: dict[str, bytes],
    overlay: dict[str, bytes | None],
    args: argparse.Namespace,
    tree: tuple[Target, list[str]] | None,
) -> int:
    paths = [f"patches/{name}" for name in sorted(patches)]
    paths += [f"vllm_overlay/{path}" for path in sorted(overlay)]
    if args.commit:
        _refuse_mixture(paths)
    for name, made in patches.items():
        _write(ps.root / "patches" / name, made)
    if args.new:
        with open(ps.root / "patches" / "series", "a") as series:
            series.write(f"{args.new}\n")
        paths.append("patches/series")
    for path, data in overlay.items():
        _write(ps.root / "vllm_overlay" / path, data)
    print("\n".join(f"wrote {path}" for path in paths) or "nothing to write")
    if tree is not None:
        for path in tree[1]:
            print(f"left alone, a new file: {path} (--add {path} takes it)")
        if not args.only:
            front.apply(tree[0], load_patch_set(ps.root), with_import=False)
    if args.commit and paths:
        _commit(ps, args.commit, paths)
    return 0
