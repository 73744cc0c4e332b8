# SPDX-License-Identifier: Apache-2.0
"""Prepare the upstream pull requests: a clean branch, and a description for each.

One commit a concern on the pinned base, each with its tests and docs, checked by
vLLM's own hooks. The descriptions follow the template of the tree, and their results
are written for upstream in docs/pull_requests. What upstream can't see is refused, in
texts and files, and so is a commit that needs a later one. Nothing is pushed, and what
only the submitting person can state is left for them to fill in.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import tomllib
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from .apply import say
from .errors import PatchSetError
from .fetch import fetch_release, unpack
from .hooks import run_hooks
from .mailpatch import Patch
from .patchset import PatchSet, load_patch_set, patched_bytes
from .place import apply_anywhere
from .pr_checks import (
    borrowed,
    check_files,
    check_text,
    number_faults,
    without_sources,
)
from .target import check_version, open_tree
from .verify import BASE_DATE

BRANCH = "kv-balanced-mla"
PLACE = "**TO BE FILLED IN BY THE SUBMITTER**"


@dataclass
class Concern:
    """One pull request: what `pull_requests.toml` says, and what matches it."""

    name: str
    title: str
    patches: list[str]
    overlay: list[str]
    issues: list[str]
    searches: list[str]
    overview: str
    claims: list[str]
    details: str
    results: str = ""  # a text of docs/pull_requests; none: the submitter's to give
    own_patches: list[Patch] = field(default_factory=list)
    own_files: list[str] = field(default_factory=list)

    @property
    def paths(self) -> list[str]:
        """Every file that the commit changes or adds."""
        return sorted(
            {*self.own_files, *(f.path for p in self.own_patches for f in p.files)}
        )


def load_concerns(ps: PatchSet) -> list[Concern]:
    """Read the split and assign every patch and overlay file.

    Raises:
        PatchSetError: A file belongs to no pull request.

    """
    path = ps.root / "patches" / "pull_requests.toml"
    try:
        concerns = [Concern(**e) for e in tomllib.loads(path.read_text())["pr"]]
    except (OSError, tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise PatchSetError(
            "the split into pull requests can't be read", got=f"{path}: {error}"
        ) from error
    lost = []
    for patch in ps.patches:
        for concern in concerns:
            if any(fnmatch(patch.name, pattern) for pattern in concern.patches):
                concern.own_patches.append(patch)
                break
        else:
            lost.append(f"patches/{patch.name}")
    for file in sorted(ps.overlay):
        for concern in concerns:
            if any(fnmatch(file, pattern) for pattern in concern.overlay):
                concern.own_files.append(file)
                break
        else:
            lost.append(f"vllm_overlay/{file}")
    if lost:
        raise PatchSetError(
            "files that belong to no pull request",
            got="\n".join(lost),
            todo=f"add a pattern to {path.relative_to(ps.root)}",
        )
    return [c for c in concerns if c.own_patches or c.own_files]


def write_concern(ps: PatchSet, tree: Path, concern: Concern) -> None:
    """Put one concern's files into the tree, on top of the ones before.

    Raises:
        PatchSetError: A patch leans on one of a later pull request.

    """
    for patch in concern.own_patches:
        for part in patch.files:
            made, notes = apply_anywhere((tree / part.path).read_bytes(), part)
            if made is None:
                raise PatchSetError(
                    f"{patch.name} doesn't apply without the patches before it",
                    got="; ".join(notes),
                    todo="put both into one pull request",
                )
            (tree / part.path).write_bytes(made)
    for path in concern.own_files:
        file = tree / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(ps.overlay[path].data)
        if ps.overlay[path].executable:
            file.chmod(0o755)


def check_whole(ps: PatchSet, tree: Path, stock: dict[str, bytes]) -> None:
    """Check that all commits together give exactly the patched tree."""
    want = {p: patched_bytes(stock[p], parts) for p, parts in ps.edits.items()}
    want |= {p: f.data for p, f in ps.overlay.items()}
    bad = [p for p, data in want.items() if (tree / p).read_bytes() != data]
    if bad:
        raise PatchSetError("the branch isn't the patched tree", got=", ".join(bad))


class Git:
    """git in one folder, with a fixed identity and date where none is configured."""

    def __init__(self, root: Path, fixed: bool) -> None:
        self.root = root
        self.env = dict(os.environ)
        if fixed:
            self.env |= {"GIT_AUTHOR_DATE": BASE_DATE, "GIT_COMMITTER_DATE": BASE_DATE}

    def __call__(self, *args: str) -> str:
        """Run git; return what it prints."""
        words = ["git", "-c", "core.hooksPath=/dev/null", *args]
        ran = subprocess.run(
            words, cwd=self.root, env=self.env, capture_output=True, text=True
        )
        if ran.returncode:
            raise PatchSetError(f"git {args[0]} failed", got=ran.stderr.strip()[-500:])
        return ran.stdout.strip()

    def name_author(self) -> None:
        """Set a placeholder where git knows no author; a person amends it."""
        try:
            self("config", "user.email")
        except PatchSetError:
            self("config", "user.name", "KV-balanced MLA contributors")
            self("config", "user.email", "kv-balanced-mla@localhost")


def make_base(ps: PatchSet, out: Path, clone: Path | None) -> tuple[Path, Git]:
    """Return a clean tree on the pinned base, with the branch checked out."""
    tree = out / ps.pin.project
    if clone is not None:
        check_version(open_tree(clone, ps.pin), ps.pin)
        Git(out, False)("clone", "-q", str(clone.resolve()), str(tree))
        git = Git(tree, False)
        git("checkout", "-q", "-b", BRANCH, ps.pin.tag)
        git.name_author()
        return tree, git
    unpack(fetch_release(ps.pin), tree)
    git = Git(tree, True)
    git("init", "-q", "-b", "base")
    git.name_author()
    git("add", "-A", "-f")
    git("commit", "-q", "-m", f"{ps.pin.project} {ps.pin.version}")
    git("tag", ps.pin.tag)
    git("checkout", "-q", "-b", BRANCH)
    return tree, git


def fill_template(template: str, sections: dict[str, str]) -> str:
    """Replace the comment below each `## Heading` of the template by our text.

    Raises:
        PatchSetError: The template has no such heading: it changed.

    """
    for heading, text in sections.items():
        pattern = rf"(?s)(?<=## {re.escape(heading)}\n\n)<!--.*?-->"
        pieces = re.split(pattern, template, maxsplit=1)
        template, count = text.strip().join(pieces), len(pieces) - 1
        if not count:
            raise PatchSetError(
                "upstream's pull request template changed",
                got=f"no comment below `## {heading}`",
                todo="adapt make_pr.py to .github/PULL_REQUEST_TEMPLATE.md",
            )
    return template


def results_text(ps: PatchSet, concern: Concern, tree: Path) -> str:
    """Return the results that a pull request shows, as upstream sees them.

    Raises:
        PatchSetError: There is no such text, it holds what upstream can't see, or a
            number that isn't on the page that it names.

    """
    if not concern.results:
        return f"{PLACE}: no measurements are recorded yet."
    path = ps.root / "docs" / "pull_requests" / concern.results
    where = path.relative_to(ps.root).as_posix()
    try:
        text = path.read_text()
    except OSError as error:
        raise PatchSetError(
            "a text of results can't be read", got=f"{concern.name}: {error}"
        ) from error
    check_text(where, text, tree)
    if faults := number_faults(text, ps.root / "docs" / "measurements"):
        raise PatchSetError(
            "numbers of a text aren't on the page that it names",
            got="\n".join(f"{where}:{fault}" for fault in faults),
            todo="copy them from the page, or name the page that has them",
        )
    return without_sources(text)


def check_words(concern: Concern, tree: Path) -> None:
    """Refuse what upstream can't see, and bare links, in the split's own texts."""
    where = f"patches/pull_requests.toml, {concern.name}"
    texts = {
        "title": concern.title,
        "overview": concern.overview,
        "claims": "\n".join(concern.claims),
        "details": concern.details,
        "issues": "\n".join(concern.issues),
    }
    for name, text in texts.items():
        check_text(f"{where}, {name}", text.strip(), tree)
    bare = [issue for issue in concern.issues if len(issue.split()) < 2]
    if bare:
        raise PatchSetError(
            "a link without a word on what it is",
            got=f"{where}: {', '.join(bare)}",
            todo='write "Fixes URL", or a sentence with the URL in it',
        )


def check_order(concerns: list[Concern], number: int, tree: Path) -> list[Concern]:
    """Check that a commit imports no module of a later one.

    Args:
        concerns: All of them, in order.
        number: Which one was just put into the tree, from 0.
        tree: The branch with it.

    Returns:
        The earlier concerns whose modules it imports.

    Raises:
        PatchSetError: It imports a later one's.

    """
    here = concerns[number]
    owners = {
        path: other.name
        for other in concerns
        if other is not here
        for path in other.own_files
        if other in concerns[:number] or not (tree / path).exists()
    }
    found = borrowed(tree, here.paths, owners)
    late = [line for c in concerns[number + 1 :] for line in found.get(c.name, [])]
    if late:
        raise PatchSetError(
            f"{here.name} imports modules that only a later commit brings",
            got="\n".join(late),
            todo="move what needs them to that commit's files, or reorder the split",
        )
    return [c for c in concerns[:number] if c.name in found]


def describe(
    ps: PatchSet,
    concern: Concern,
    tree: Path,
    hooks: list[tuple[str, bool, str]],
    results: str,
    below: list[Concern],
) -> str:
    """Return one pull request's description.

    Args:
        ps: The patch set.
        concern: What the description is for.
        tree: The branch.
        hooks: The hooks that ran: name, whether it passed, what it said.
        results: What was measured, as upstream sees it.
        below: The concerns that this one depends on.

    """
    template = (tree / ".github" / "PULL_REQUEST_TEMPLATE.md").read_text()
    tests = [p for p in concern.paths if Path(p).name.startswith("test_")]
    tests += [p.trailers["Test"] for p in concern.own_patches if p.trailers.get("Test")]
    plan = "\n".join(f"pytest {t}" for t in sorted(set(tests))) or "(no tests)"
    passed = ", ".join(name for name, good, _ in hooks if good)
    failed = ", ".join(name for name, good, _ in hooks if not good)
    searches = "\n".join(
        f'gh pr list --repo vllm-project/vllm --state open --search "{s}"'
        for s in concern.searches
    )
    notes = [*concern.issues]
    if below:
        titles = ", ".join(f"`{c.title}`" for c in below)
        notes.append(f"Depends on {titles}: review this one's own commit only.")
    return fill_template(
        template,
        {
            "Overview": "\n\n".join([concern.overview.strip(), *notes]),
            "Claims": "\n".join(f"- {c}" for c in concern.claims) or f"- {PLACE}",
            "Validation": f"""Test plan:

```bash
{plan}
```

Test results:

{results}

Hooks that passed offline: {passed or "none were run"}.{
                f" Failed: {failed}." if failed else ""
            }
Model evaluation on a real checkpoint: {PLACE}.""",
            "Details": f"""{concern.details.strip()}

### Duplicates to check before submitting

```bash
{searches}
```

Why this doesn't duplicate an open pull request: {PLACE}.

### Statements that upstream asks of the person who submits

- I understand this change end to end, reviewed every changed line, and can defend
  it: {PLACE}
- I ran the test plan above; commands and results are in Validation: {PLACE}
- Whether, and for what, AI assistance was used: {PLACE}
- Every commit carries my Signed-off-by (`git rebase --signoff {ps.pin.tag}`): {PLACE}
- User-visible changes are in the rendered docs of this pull request: {PLACE}""",
        },
    )


def main(argv: list[str]) -> int:
    """Run scripts/make_pr.sh; return 1 when a hook failed."""
    made = argparse.ArgumentParser(
        prog="scripts/make_pr.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("out", type=Path, metavar="OUT", help="a folder to create")
    made.add_argument("--clone", type=Path, help="base on this clone of vLLM")
    made.add_argument("--no-hooks", action="store_true", help="leave the hooks out")
    made.add_argument("--project", type=Path, help=argparse.SUPPRESS)
    args = made.parse_args(argv)
    ps = load_patch_set(args.project or Path(__file__).resolve().parents[2])
    concerns = load_concerns(ps)
    if args.out.exists() and any(args.out.iterdir()):
        raise PatchSetError("OUT isn't empty", got=str(args.out), todo="name a new one")
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        return _build(ps, concerns, args.out.resolve(), args.clone, not args.no_hooks)
    except BaseException:
        shutil.rmtree(args.out, ignore_errors=True)
        raise


def _build(
    ps: PatchSet, concerns: list[Concern], out: Path, clone: Path | None, hooks: bool
) -> int:
    say(f"a clean base of {ps.pin.project} {ps.pin.version}")
    tree, git = make_base(ps, out, clone)
    stock = {p: (tree / p).read_bytes() for p in ps.edits}
    failed = 0
    for number, concern in enumerate(concerns, 1):
        write_concern(ps, tree, concern)
        check_files(concern.paths, tree, stock)
        check_words(concern, tree)
        below = check_order(concerns, number - 1, tree)
        results = results_text(ps, concern, tree)
        git("add", "-A", "-f", "--", *concern.paths)
        body = concern.overview.strip()
        git("commit", "-q", "-m", f"{concern.title}\n\n{body}")
        say(f"{number}. {concern.title}: {len(concern.paths)} files")
        done = run_hooks(tree, concern.paths) if hooks else []
        for name, good, said in done:
            if not good:
                failed += 1
                say(
                    f"   FAILED {name}\n      " + said[-2000:].replace("\n", "\n      ")
                )
        text = describe(ps, concern, tree, done, results, below)
        (out / f"{number}-{concern.name}.md").write_text(text)
    check_whole(ps, tree, stock)
    if git("status", "--porcelain"):
        raise PatchSetError("the branch's tree isn't clean", got=git("status", "-s"))
    say(f"branch {BRANCH} in {tree}, descriptions beside it; nothing was pushed")
    if failed:
        say(f"{failed} hook(s) failed")
    return 1 if failed else 0
