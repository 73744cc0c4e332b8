# SPDX-License-Identifier: Apache-2.0
"""Command line of scripts/apply.sh."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from pathlib import Path

from . import apply as front
from .errors import PatchSetError
from .fetch import fetch_release, unpack
from .patchset import PatchSet, load_patch_set
from .pin import check_hashes
from .target import Target, open_installed, open_tree


def parser() -> argparse.ArgumentParser:
    """Return the parser of scripts/apply.sh."""
    made = argparse.ArgumentParser(
        prog="scripts/apply.sh",
        description="Turn a vLLM tree of the pinned version into the patched one. "
        "Without TARGET: fetch the pinned source release through pip as it is "
        "configured here, check its sha256, unpack it to build/vllm and patch that.",
    )
    made.add_argument(
        "target",
        nargs="?",
        type=Path,
        metavar="TARGET",
        help="a git clone at the tag, an unpacked source release, or a site-packages "
        "folder",
    )
    made.add_argument(
        "--installed",
        action="store_true",
        help="the vllm package of the current Python (files under vllm/ only)",
    )
    verb = made.add_mutually_exclusive_group()
    verb.add_argument(
        "--check", action="store_true", help="would it apply? writes nothing"
    )
    verb.add_argument(
        "--reverse", action="store_true", help="make it stock again, byte for byte"
    )
    verb.add_argument(
        "--status", action="store_true", help="version, patches, files and hashes"
    )
    made.add_argument("--json", action="store_true", help="--status as JSON")
    made.add_argument(
        "--discard", action="store_true", help="with --reverse: drop edits made since"
    )
    made.add_argument(
        "--sdist", type=Path, metavar="FILE", help="a source release already here"
    )
    made.add_argument(
        "--no-import",
        action="store_true",
        help="don't import the result to resolve the backends (source is still read)",
    )
    made.add_argument("--project", type=Path, help=argparse.SUPPRESS)
    return made


def default_tree(patch_set: PatchSet) -> Path:
    """Return where the fetched release is unpacked."""
    return patch_set.root / "build" / patch_set.pin.project


def fetched_tree(patch_set: PatchSet, sdist: Path | None, fetch: bool) -> Target:
    """Return build/vllm as a target, fetching and unpacking it first if asked to.

    A tree there of an older pin holds nothing that export didn't save, unless its
    files were edited: such a tree is refused, not replaced.

    Raises:
        PatchSetError: It isn't there and may not be fetched, or can't be had.

    """
    tree, pin = default_tree(patch_set), patch_set.pin
    if tree.exists():
        target = open_tree(tree, pin)
        if target.version == pin.version or not fetch:
            return target
        front.say(f"{tree} holds {target.version}: the pin is {pin.version} now")
        front.reverse(target, patch_set)
        shutil.rmtree(tree)
    if not fetch:
        raise PatchSetError(
            "there is no tree yet", got=str(tree), todo="run scripts/apply.sh"
        )
    check_hashes(pin)
    archive = fetch_release(pin, given=sdist)
    front.say(f"unpacking to {tree}")
    unpack(archive, tree)
    return open_tree(tree, pin)


def _print_status(facts: dict, as_json: bool) -> None:
    if as_json:
        print(json.dumps(facts, indent=1))
        return
    for key in ("target", "kind", "version", "state", "patch_set"):
        print(f"{key + ':':<11}{facts[key]}")
    if facts["applied_patch_set"] != "none":
        print(
            f"{'applied:':<11}{facts['applied_patch_set']} from revision "
            f"{facts['applied_from_revision'] or 'unknown'}"
        )
    for patch in facts["applied_patches"]:
        print(f"  patch  {patch['sha256'][:16]}  {patch['name']}")
    for file in facts["files"]:
        print(
            f"  {file['origin']:<9}{(file['sha256'] or '-')[:16]:<16}  "
            f"{file['state']:<8} {file['path']}"
        )
        if "why" in file:
            print(f"         {file['why']}")


def main(argv: list[str]) -> int:
    """Run scripts/apply.sh; return its exit status."""
    made = parser()
    args = made.parse_args(argv)
    if args.target and args.installed:
        made.error("TARGET and --installed exclude each other")
    if args.discard and not args.reverse:
        made.error("--discard goes with --reverse")
    if args.json and not args.status:
        made.error("--json goes with --status")
    here = Path(__file__).resolve().parents[2]
    patch_set = load_patch_set(args.project or here)
    if args.installed:
        target = open_installed(patch_set.pin)
    elif args.target:
        target = open_tree(args.target, patch_set.pin)
    else:
        fetch = not (args.check or args.reverse or args.status)
        target = fetched_tree(patch_set, args.sdist, fetch)
    if args.status:
        facts, code = front.status(target, patch_set)
        _print_status(facts, args.json)
        return code
    if args.check:
        print(f"{front.check(target, patch_set)}: {target.root}")
    elif args.reverse:
        front.reverse(target, patch_set, args.discard)
    else:
        with_import = not args.no_import and not os.environ.get("KVPATCH_NO_IMPORT")
        front.apply(target, patch_set, with_import)
    return 0
