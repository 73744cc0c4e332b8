# SPDX-License-Identifier: Apache-2.0
"""Check that the patch set is what it says, against the pinned release.

Every row of the table is one promise; a broken one makes the exit status 1.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from . import apply as front
from . import probe
from .errors import PatchSetError
from .fetch import fetch_release, unpack
from .mailpatch import KINDS, Patch
from .patchset import PatchSet, load_patch_set, patched_bytes
from .pin import check_hashes
from .render import rerender
from .state import sha256
from .target import open_tree

MAX_CHANGED_LINES = 120
BASE_DATE = "2026-01-01T00:00:00+00:00"
SPDX = (
    "# SPDX-License-Identifier: Apache-2.0",
    "# SPDX-FileCopyrightText: Copyright contributors to the vLLM project",
)


@dataclass
class Row:
    """One check's outcome; `good` is None where it was left out."""

    name: str
    good: bool | None
    detail: str


class Table:
    """Runs checks and prints a line for each as it ends."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def check(self, name: str, run: Callable[[], str], *needs: str) -> None:
        """Run a check: it returns what it saw, or raises.

        Args:
            name: Of the row.
            run: The check.
            needs: Rows whose miss this one would only repeat; it's left out then.

        """
        missed = [r.name for r in self.rows if r.name in needs and r.good is False]
        if missed:
            self.skip(name, f"until this row holds: {', '.join(missed)}")
            return
        try:
            row = Row(name, True, run())
        except PatchSetError as error:
            row = Row(name, False, str(error))
        self._add(row)

    def skip(self, name: str, why: str) -> None:
        """Note a check that was left out."""
        self._add(Row(name, None, why))

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        mark = {True: "ok", False: "MISS", None: "left out"}[row.good]
        detail = row.detail.replace("\n", "\n" + " " * 11)
        print(f"{mark:<9}  {row.name}: {detail}", flush=True)

    @property
    def misses(self) -> int:
        """Number of broken promises."""
        return sum(row.good is False for row in self.rows)


def _fail_if(bad: list[str], what: str, allowed: str = "", todo: str = "") -> None:
    if bad:
        raise PatchSetError(what, got="\n".join(bad), allowed=allowed, todo=todo)


def header_faults(patch: Patch) -> list[str]:
    """Return what a patch's header lacks."""
    faults = []
    trailers = patch.trailers
    if not re.fullmatch(r"[\w][\w .,/-]*: \S.*", patch.subject):
        faults.append(f"subject {patch.subject!r} isn't `<area>: <what>`")
    if len(patch.body) < 40:
        faults.append("no body that says why the overlay can't hold it")
    if trailers.get("Kind") not in KINDS:
        faults.append(f"Kind: {trailers.get('Kind')} (one of {', '.join(KINDS)})")
    forwarded = trailers.get("Forwarded", "")
    if not re.fullmatch(r"no|not-needed \(.+\)|https://\S+", forwarded):
        faults.append(f"Forwarded: {forwarded!r} (no, not-needed (why), or a URL)")
    if trailers.get("Kind") == "bugfix" and not trailers.get("Bug"):
        faults.append("Kind: bugfix without Bug:")
    for key in ("Remove-When", "Test"):
        if not trailers.get(key):
            faults.append(f"no {key}:")
    if not re.search(r"(?m)^From: .+ <.+@.+>$", patch.header):
        faults.append("no From: NAME <MAIL>, which `git am` needs")
    if patch.changed_lines > MAX_CHANGED_LINES:
        faults.append(f"{patch.changed_lines} changed lines (max {MAX_CHANGED_LINES})")
    if unfilled := re.findall(r"(?m)^.*\bTODO\b.*$", patch.header):
        faults.append(f"unfilled: {'; '.join(unfilled)}")
    return [f"{patch.name}: {fault}" for fault in faults]


def check_headers(ps: PatchSet) -> str:
    """Check every patch's header and trailers."""
    bad = [fault for patch in ps.patches for fault in header_faults(patch)]
    _fail_if(bad, "a header is incomplete", todo="see patches/README.md")
    return f"{len(ps.patches)} patches"


def check_overlay_headers(ps: PatchSet) -> str:
    """Check the licence lines of the overlay's Python files."""
    bad = []
    for path, file in ps.overlay.items():
        head = file.data.decode(errors="replace").split("\n")[:3]
        if path.endswith(".py") and not all(line in head for line in SPDX):
            bad.append(path)
    _fail_if(bad, "an overlay file lacks its SPDX lines", allowed="\n".join(SPDX))
    return f"{len(ps.overlay)} files"


def check_split(ps: PatchSet) -> str:
    """Check that every patch and overlay file belongs to a pull request."""
    from .make_pr import load_concerns  # which imports this module

    return f"{len(load_concerns(ps))} pull requests hold every patch and overlay file"


def check_tests_exist(ps: PatchSet, tree: Path) -> str:
    """Check that the tests which the trailers name are in the patched tree."""
    bad = []
    for patch in ps.patches:
        for word in re.split(r"[,\s]+", patch.trailers.get("Test", "")):
            if word and not (tree / word.split("::")[0]).exists():
                bad.append(f"{patch.name}: Test: {word}")
    _fail_if(bad, "a patch names a test that the tree doesn't have")
    return "every Test: trailer names a file"


def check_series(
    ps: PatchSet, stock: Callable[[str], bytes | None], under: str = ""
) -> str:
    """Apply every patch of files below a folder, with neither fuzz nor offset."""
    bad = []
    edits = {p: parts for p, parts in ps.edits.items() if p.startswith(under)}
    for path, parts in edits.items():
        data = stock(path)
        if data is None:
            bad.append(f"{path}: upstream has no such file")
            continue
        try:
            patched_bytes(data, parts)
        except PatchSetError as error:
            bad.append(str(error))
    _fail_if(bad, "the series doesn't apply")
    return f"{len(edits)} files, zero fuzz, zero offset"


def check_shadow(ps: PatchSet, stock: Callable[[str], bytes | None]) -> str:
    """Check overlay files against upstream's list of files."""
    bad, todo = [], []
    for path, file in ps.overlay.items():
        data, pinned = stock(path), ps.pin.shadow.get(path)
        line = "" if data is None else f'"{path}" = "{sha256(data)}"'
        if data is not None and pinned is None:
            bad.append(f"{path}: upstream has it, [shadow] doesn't list it")
            todo.append(f"to replace upstream's file, add to [shadow]:\n{line}")
            todo.append(f"else remove or rename vllm_overlay/{path}")
        elif data is None and pinned is not None:
            bad.append(f"{path}: [shadow] lists it, upstream doesn't have it")
            todo.append(f"remove the line of {path} from [shadow]")
        elif data is not None and sha256(data) != pinned:
            bad.append(f"{path}: upstream's sha256 is {sha256(data)}, not {pinned}")
            todo.append(f"read what changed upstream, then have in [shadow]:\n{line}")
        if data == file.data:
            bad.append(f"{path}: it is upstream's, unchanged, and replaces nothing")
            todo.append(f"edit vllm_overlay/{path}, or remove it and its line")
    _fail_if(
        bad,
        "UPSTREAM.toml [shadow] isn't what upstream holds",
        allowed="a line for each overlay file that upstream has, with its sha256 there",
        todo="\n".join(todo),
    )
    return f"{len(ps.pin.shadow)} replaced, {len(ps.overlay)} overlay files"


def check_export(ps: PatchSet, stock: Callable[[str], bytes | None]) -> str:
    """Write every patch anew and compare it with the file."""
    plain = {path: stock(path) or b"" for path in ps.edits}
    bad = []
    for patch in ps.patches:
        kept, again = rerender(ps, patch, plain)
        if kept != again:
            bad.append(patch.name)
    _fail_if(bad, "a patch isn't in the form that export writes",
             todo="scripts/export.sh --rewrite")  # fmt: skip
    return "every patch, byte for byte"


def check_round_trip(ps: PatchSet, tree: Path) -> str:
    """Apply to a tree, apply again, reverse, and compare every byte."""
    before = _digest(tree)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        front.apply(open_tree(tree, ps.pin), ps, with_import=False)
        once = _digest(tree)
        front.apply(open_tree(tree, ps.pin), ps, with_import=False)
        if _digest(tree) != once or "nothing changed" not in said.getvalue():
            raise PatchSetError("a second run changed something", got=str(tree))
        front.reverse(open_tree(tree, ps.pin), ps)
    after = _digest(tree)
    diff = sorted(p for p in {*before, *after} if before.get(p) != after.get(p))
    _fail_if(diff[:10], "reverse doesn't give the stock tree")
    return f"{len(after)} files as before"


def _digest(tree: Path) -> dict[str, str]:
    """Return every file's hash; folders count, git's own data doesn't."""
    found = {}
    for folder, dirs, files in os.walk(tree):
        dirs[:] = [d for d in dirs if d != ".git"]
        base = Path(folder)
        found[str(base)] = "folder"
        for name in files:
            path = base / name
            mode = oct(path.lstat().st_mode)
            found[str(path)] = mode + sha256(path.read_bytes())
    return found


def check_git_am(ps: PatchSet, tree: Path) -> str:
    """Make a clone with a fixed base commit, and let git apply the mails."""

    def git(*args: str) -> str:
        env = {
            **os.environ,
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_AUTHOR_DATE": BASE_DATE,
            "GIT_COMMITTER_DATE": BASE_DATE,
        }
        who = ["-c", "user.name=base", "-c", "user.email=base@localhost"]
        ran = subprocess.run(
            ["git", *who, *args], cwd=tree, env=env, capture_output=True, text=True
        )
        if ran.returncode:
            raise PatchSetError(
                f"git {args[0]} failed", got=(ran.stderr or ran.stdout).strip()[-800:]
            )
        return ran.stdout.strip()

    git("init", "-q")
    git("add", "-A", "-f")
    git("commit", "-q", "-m", f"{ps.pin.project} {ps.pin.version}")
    git("tag", ps.pin.tag)
    base = git("rev-parse", "--short=12", "HEAD")
    mails = [str(ps.root / "patches" / p.name) for p in ps.patches]
    if mails:
        git("am", "-q", "--no-3way", *mails)
    for path, parts in ps.edits.items():
        want = git("hash-object", path)
        if not want.startswith(parts[-1][1].new_blob):
            raise PatchSetError("git gives another file", got=path)
    git("reset", "-q", "--hard", ps.pin.tag)
    return f"{len(mails)} mails on base commit {base}"


def check_probe(ps: PatchSet, tree: Path) -> str:
    """Resolve the backends by importing the patched tree in a fresh process."""
    values = [probe.probe_import(tree, entry) for entry in ps.pin.registry]
    return ", ".join(values)


@contextlib.contextmanager
def _applied(ps: PatchSet, tree: Path) -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()):
        front.apply(open_tree(tree, ps.pin), ps, with_import=False)
    try:
        yield
    finally:
        with contextlib.redirect_stdout(io.StringIO()):
            front.reverse(open_tree(tree, ps.pin), ps)


def _wheel_tree(wheel: Path, dest: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        skip = (".so", "vllm-rs")  # the large ones, which no patch touches
        names = [n for n in archive.namelist() if not n.endswith(skip)]
        archive.extractall(dest, names)
    return dest


def reader(tree: Path) -> Callable[[str], bytes | None]:
    """Return a function that reads a tree's file, or gives None."""

    def read(path: str) -> bytes | None:
        file = tree / path
        return file.read_bytes() if file.is_file() else None

    return read


def verify(ps: PatchSet, tree: Path, wheel: Path | None, import_too: bool) -> int:
    """Run every check; return the number of misses.

    Args:
        ps: The set.
        tree: An unpacked stock source release, which is changed and put back.
        wheel: The release's wheel, or None to leave it out.
        import_too: Also import the result.

    """
    table, stock = Table(), reader(tree)
    shadow, series = "overlay and [shadow]", "series on the source release"
    trip = "apply and reverse, source release"
    table.check("the pin's hashes", lambda: check_hashes(ps.pin))
    table.check("headers and trailers", lambda: check_headers(ps))
    table.check("overlay licence lines", lambda: check_overlay_headers(ps))
    table.check("split into pull requests", lambda: check_split(ps))
    table.check(shadow, lambda: check_shadow(ps, stock))
    table.check(series, lambda: check_series(ps, stock))
    table.check("re-export", lambda: check_export(ps, stock), series)
    table.check(trip, lambda: check_round_trip(ps, tree), shadow, series)

    def patched() -> str:
        with _applied(ps, tree):
            said = check_tests_exist(ps, tree)
            if import_too:
                said += "; imported: " + check_probe(ps, tree)
        return said

    table.check("the patched tree", patched, shadow, series, trip)
    if not import_too:
        table.skip("import probe", "this Python has no torch")
    table.check("git am on a clone", lambda: check_git_am(ps, tree), series)
    table.check(
        "apply and reverse, clone",
        lambda: check_round_trip(ps, tree),
        *(shadow, series, trip),
    )
    if wheel is None:
        table.skip("the wheel's files", "--wheel fetches them (336 MB)")
    else:
        site = _wheel_tree(wheel, tree.parent / "site")
        wheels = "series on the wheel"
        table.check(wheels, lambda: check_series(ps, reader(site), "vllm/"))
        table.check(
            "apply and reverse, wheel",
            lambda: check_round_trip(ps, site),
            *(shadow, series, wheels),
        )
    total = len(table.rows)
    print(f"{table.misses} of {total} rows miss" if table.misses else "all hold")
    return table.misses


def main(argv: list[str]) -> int:
    """Run scripts/verify.sh; return its exit status."""
    made = argparse.ArgumentParser(
        prog="scripts/verify.sh", description=(__doc__ or "").split("\n")[0]
    )
    made.add_argument("--sdist", type=Path, help="the source release, if it's here")
    made.add_argument(
        "--wheel",
        nargs="?",
        const="fetch",
        metavar="FILE",
        help="check the wheel's files too; without FILE, fetch it",
    )
    made.add_argument("--project", type=Path, help=argparse.SUPPRESS)
    args = made.parse_args(argv)
    ps = load_patch_set(args.project or Path(__file__).resolve().parents[2])
    wheel = None
    if args.wheel:
        given = None if args.wheel == "fetch" else Path(args.wheel)
        wheel = fetch_release(ps.pin, wheel=True, given=given)
    sdist = fetch_release(ps.pin, given=args.sdist)
    print(f"{ps.pin.project} {ps.pin.version}, patch set {ps.ident}")
    tmp = Path(tempfile.mkdtemp(prefix="kvpatch-verify-"))
    try:
        tree = tmp / ps.pin.project
        unpack(sdist, tree)
        return 1 if verify(ps, tree, wheel, probe.importable(tree)) else 0
    finally:
        shutil.rmtree(tmp, ignore_errors=True)
