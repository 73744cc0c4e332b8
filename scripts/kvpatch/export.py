# SPDX-License-Identifier: Apache-2.0
"""Write edits of the patched tree back to patches/ and vllm_overlay/.

Edits of a file that patches touch go to the last of them, or to the one named with
--patch, through every patch after it. New files of the tree go to the overlay. The
same tree gives the same bytes. Nothing is written unless everything can be.

With --port, needs no tree: every patch is placed anew on the pinned release, after the
pin moved, a patch was dropped or one was edited by hand. What doesn't fit is laid into
build/port/ to be resolved, and patches/ stays as it is until everything fits.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tarfile
from dataclasses import dataclass, field
from pathlib import Path

from . import apply as front
from .cli_apply import default_tree
from .errors import PatchSetError
from .fetch import fetch_release
from .mailpatch import Patch
from .merge import merge
from .patchset import JUNK_DIRS, JUNK_ENDS, PatchSet, load_patch_set, patched_bytes
from .port import forget, port
from .render import render, rerender
from .state import sha256
from .target import Target, check_version, git, open_tree
from .transact import (
    STATE_DIR,
    Change,
    interrupted,
    read_json,
    read_or_none,
    repair,
    run_changes,
    tree_lock,
)

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
        made, clean = final, True
        if not last:
            made, clean = merge(states[i + 1], states[-1], final, ("", "", ""))
        if not clean:
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


def check_pinned(ps: PatchSet, stock: dict[str, bytes]) -> None:
    """Check that the series is for the pinned release, exactly as it is written.

    Raises:
        PatchSetError: It isn't: no tree can have been patched with it.

    """
    for path, parts in ps.edits.items():
        try:
            if path not in stock:
                raise PatchSetError(f"{ps.pin.project} {ps.pin.version} has no {path}")
            patched_bytes(stock[path], parts)
        except PatchSetError as error:
            raise PatchSetError(
                "the series isn't for the pinned release, or was edited by hand",
                got=error.what,
                todo="scripts/export.sh --port",
            ) from error


def rewrite(ps: PatchSet, stock: dict[str, bytes]) -> dict[str, bytes]:
    """Return every patch in the form that export writes, where it isn't yet."""
    both = {p.name: rerender(ps, p, stock) for p in ps.patches}
    return {name: made for name, (kept, made) in both.items() if kept != made}


def _write(root: Path, new: dict[str, bytes | None]) -> None:
    """Write files of this project, None to remove one: all or none."""
    changes = [Change(p, read_or_none(root / p), data) for p, data in new.items()]
    with tree_lock(root):
        try:
            run_changes(root, changes)
        finally:
            if not interrupted(root):
                shutil.rmtree(root / STATE_DIR)


def _put_back(root: Path) -> None:
    """Take back what an export that was cut off had written."""
    if interrupted(root):
        with tree_lock(root):
            paths = repair(root)
            shutil.rmtree(root / STATE_DIR)
        print(f"an earlier export was interrupted: put {len(paths)} file(s) back")


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
    made.add_argument(
        "--port",
        action="store_true",
        help="place every patch anew on the pinned release: the pin moved, or a patch "
        "was dropped or edited by hand",
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
    root = args.project or Path(__file__).resolve().parents[2]
    if args.port and any(
        (args.tree, args.patch, args.new, args.add, args.only, args.rewrite)
    ):
        made.error("--port goes with --commit and --sdist only: it reads no tree")
    _put_back(root)
    ps = load_patch_set(root, chained=not args.port)
    if args.port:
        stock = read_stock(ps, fetch_release(ps.pin, given=args.sdist))
        written, used = port(ps, stock)
        status = _finish(ps, written, {}, args, None)
        forget(ps, used)
        return status
    names = [p.name for p in ps.patches]
    if args.patch and args.patch not in names:
        made.error(f"there is no patch {args.patch}; there are: {', '.join(names)}")
    if args.new and (args.new in names or not args.new.endswith(".patch")):
        made.error(f"{args.new} can't be a new patch: taken, or not NAME.patch")
    stock = read_stock(ps, fetch_release(ps.pin, given=args.sdist))
    check_pinned(ps, stock)
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
    new: dict[str, bytes | None] = {
        **{f"patches/{name}": made for name, made in patches.items()},
        **{f"vllm_overlay/{path}": data for path, data in overlay.items()},
    }
    if args.new:
        series = "patches/series"
        text = (ps.root / series).read_text()
        new[series] = f"{text.rstrip()}\n{args.new}\n".encode()
        paths.append(series)
    if new:
        _write(ps.root, new)
    print("\n".join(f"wrote {path}" for path in paths) or "nothing to write")
    if tree is not None:
        for path in tree[1]:
            print(f"left alone, a new file: {path} (--add {path} takes it)")
        if not args.only:
            front.apply(tree[0], load_patch_set(ps.root), with_import=False)
    if args.commit and paths:
        _commit(ps, args.commit, paths)
    return 0
