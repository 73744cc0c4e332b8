# SPDX-License-Identifier: Apache-2.0
"""What a target is: a git clone, an unpacked source release, an installed package."""

from __future__ import annotations

import email.parser
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from .errors import PatchSetError
from .pin import Pin

CLONE, SDIST, INSTALLED = "git clone", "source release", "installed package"


@dataclass(frozen=True)
class Target:
    """A vLLM tree.

    Attributes:
        root: Folder that holds `vllm/`.
        kind: One of CLONE, SDIST and INSTALLED.
        version: What it says it is.
        evidence: Where the version was read.

    """

    root: Path
    kind: str
    version: str
    evidence: str

    def takes(self, path: str) -> bool:
        """Tell whether a path of the patch set applies to this kind of tree."""
        return self.kind != INSTALLED or path.startswith("vllm/")


def open_tree(path: Path, pin: Pin) -> Target:
    """Recognise a folder as a vLLM tree.

    Raises:
        PatchSetError: It is none, or its version can't be told.

    """
    root = path.resolve()
    if not (root / pin.project / "__init__.py").is_file():
        inside = root.name == pin.project and (root / "__init__.py").is_file()
        raise PatchSetError(
            f"the target isn't a {pin.project} tree",
            got=str(root) + ("" if root.is_dir() else " (no such folder)"),
            allowed=f"a folder that holds {pin.project}/__init__.py: a git clone, an "
            f"unpacked source release, or a site-packages folder",
            todo=f"pass its parent, {root.parent}" if inside else "check the path",
        )
    if (root / ".git").exists():
        version, evidence = _clone_version(root, pin)
        return Target(root, CLONE, version, evidence)
    if (root / "PKG-INFO").is_file():
        return Target(root, SDIST, _metadata_version(root / "PKG-INFO"), "PKG-INFO")
    infos = sorted(root.glob(f"{pin.project}-*.dist-info/METADATA"))
    if len(infos) == 1:
        found = _metadata_version(infos[0])
        return Target(root, INSTALLED, found, infos[0].parent.name)
    raise PatchSetError(
        "the tree doesn't say which version it is",
        got=f"{root}: no .git, no PKG-INFO, {len(infos)} .dist-info folders"
        + (f" ({', '.join(i.parent.name for i in infos)})" if infos else ""),
        allowed="one of them",
        todo="remove leftovers of other versions"
        if infos
        else "unpack the release anew, or run without TARGET",
    )


def open_installed(pin: Pin) -> Target:
    """Find the package that the current Python imports.

    Raises:
        PatchSetError: None is installed, or it is an editable install.

    """
    try:
        dist = importlib.metadata.distribution(pin.project)
    except importlib.metadata.PackageNotFoundError:
        raise PatchSetError(
            f"{pin.project} isn't installed for this Python",
            got=sys.executable,
            allowed=f"a Python with {pin.project} {pin.version}",
            todo=f"activate its environment, or set PYTHON; to install: "
            f"pip install {pin.project}=={pin.version}",
        ) from None
    url = json.loads(dist.read_text("direct_url.json") or "{}")
    root = Path(str(dist.locate_file(""))).resolve()
    if url.get("dir_info", {}).get("editable"):
        spec = importlib.util.find_spec(pin.project)
        where = Path(spec.origin).parent.parent if spec and spec.origin else "its tree"
        raise PatchSetError(
            f"{pin.project} is an editable install",
            got=f"{root} points to {where}",
            allowed="a package in site-packages",
            todo=f"apply to the tree itself: scripts/apply.sh {where}",
        )
    if not (root / pin.project / "__init__.py").is_file():
        raise PatchSetError(
            f"the installed {pin.project} has no source files", got=str(root)
        )
    return Target(root, INSTALLED, dist.version, f"{sys.executable}")


def check_version(target: Target, pin: Pin) -> None:
    """Refuse a tree of another version.

    A local part ("+cu130", "+precompiled") is a build's mark, not another source.

    Raises:
        PatchSetError: The version differs from the pin.

    """
    if target.version.split("+")[0] != pin.version:
        raise PatchSetError(
            f"the target is {pin.project} of another version",
            got=f"{target.version} ({target.evidence}) at {target.root}",
            allowed=pin.version,
            todo=f"get {pin.version} (git checkout {pin.tag}, or run without TARGET); "
            "what a move would take: scripts/drift.sh --to VERSION",
        )


def _metadata_version(path: Path) -> str:
    text = path.read_text(errors="replace")
    return email.parser.HeaderParser().parsestr(text)["Version"] or "unknown"


def git(root: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Run git in a tree, free of the user's configuration of hooks and pagers."""
    # The tree may belong to another user than root in a container.
    base = ["git", "-c", "safe.directory=*", "-C", str(root), "--no-pager"]
    return subprocess.run([*base, *args], capture_output=True, text=True)


def _clone_version(root: Path, pin: Pin) -> tuple[str, str]:
    try:
        # describe prefers an annotated tag of the same commit, as of a candidate.
        here = git(root, "tag", "--points-at", "HEAD").stdout.split()
        if pin.tag in here:
            return pin.version, f"git tag {pin.tag}"
        described = git(root, "describe", "--tags", "--long", "--match", "v[0-9]*")
    except FileNotFoundError:
        described = None
    if described is not None and described.returncode == 0:
        tag, ahead, _ = described.stdout.strip().rsplit("-", 2)
        evidence = f"git tag {tag}" + ("" if ahead == "0" else f" + {ahead} commits")
        return tag.removeprefix("v"), evidence
    # A shallow clone may lack tags; the files' hashes are checked in any case.
    if (root / "PKG-INFO").is_file():
        return _metadata_version(root / "PKG-INFO"), "PKG-INFO"
    reason = "git isn't installed" if described is None else described.stderr.strip()
    raise PatchSetError(
        "the clone doesn't say which version it is",
        got=reason or "no tag",
        allowed=f"a clone in which git finds the tag {pin.tag}",
        todo=f"git fetch --depth 1 origin tag {pin.tag}",
    )
