# SPDX-License-Identifier: Apache-2.0
"""Load the patch set and say what it holds: a check that needs no tree."""

from __future__ import annotations

import argparse
from pathlib import Path

from .patchset import load_patch_set
from .pin import check_hashes


def main(argv: list[str]) -> int:
    """Run `kv.py load`; return 0 when every part parses and they agree."""
    argparse.ArgumentParser(prog="kv.py load", description=__doc__).parse_args(argv)
    ps = load_patch_set(Path(__file__).resolve().parents[2])
    check_hashes(ps.pin)
    for patch in ps.patches:
        files = ", ".join(f.path for f in patch.files)
        print(f"{patch.name}: {patch.changed_lines} changed lines in {files}")
    print(f"{len(ps.overlay)} overlay files; patch set {ps.ident}")
    return 0
