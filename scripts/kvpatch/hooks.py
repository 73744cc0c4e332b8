# SPDX-License-Identifier: Apache-2.0
"""vLLM's own pre-commit hooks on files of an assembled tree, without a network.

pre-commit would clone a repository for each tool. These are the same tools in the same
versions, from the package index, called as vLLM's configuration calls them. The rules
match paths that start with `vllm/` or `tests/`, so they only work inside a tree.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from .cli_apply import default_tree
from .errors import PatchSetError
from .patchset import load_patch_set

PYTHON_HOOKS = (
    "check_spdx_header",
    "check_forbidden_imports",
    "check_torch_cuda",
    "check_boolean_context_manager",
    "check_init_lazy_imports",
    "validate_config",
)


@dataclass(frozen=True)
class Hook:
    """A hook: its name, its command, and the files it gets."""

    name: str
    command: tuple[str, ...]
    files: tuple[str, ...]


def hooks_for(files: list[str]) -> list[Hook]:
    """Return the hooks that vLLM runs on these files, formatters in check mode."""
    python = tuple(f for f in files if f.endswith(".py"))
    package = tuple(f for f in python if f.startswith("vllm/"))
    tests = tuple(f for f in python if f.startswith("tests/"))
    shell = tuple(f for f in files if f.endswith(".sh"))
    own = [
        Hook(name, (sys.executable, f"tools/pre_commit/{name}.py"), python)
        for name in PYTHON_HOOKS
    ]
    made = [
        Hook("ruff-check", ("ruff", "check", "--no-cache"), python),
        Hook("ruff-format", ("ruff", "format", "--no-cache", "--check"), python),
        Hook("typos", ("typos", "--force-exclude"), tuple(files)),
        Hook("shellcheck", ("shellcheck", "-s", "bash"), shell),
        *own,
        Hook(
            "check_trust_remote_code",
            (sys.executable, "tools/pre_commit/check_trust_remote_code.py"),
            package,
        ),
        Hook(
            "check_test_tethering",
            (sys.executable, "tools/pre_commit/check_test_tethering.py"),
            tests,
        ),
        Hook("mypy", (sys.executable, "tools/pre_commit/mypy.py", "3.11"), python),
    ]
    return [hook for hook in made if hook.files]


def run_hooks(tree: Path, files: list[str]) -> list[tuple[str, bool, str]]:
    """Run the hooks in a tree.

    Args:
        tree: The assembled tree.
        files: Relative to it.

    Returns:
        For each hook its name, whether it passed, and what it printed.

    Raises:
        PatchSetError: A tool isn't installed beside this Python.

    """
    bin_dir = Path(sys.executable).parent
    env = dict(os.environ, PATH=f"{bin_dir}{os.pathsep}{os.environ['PATH']}")
    if missing := [t for t in ("ruff", "typos", "mypy") if not (bin_dir / t).exists()]:
        raise PatchSetError(
            "a linter isn't installed",
            got=f"no {', '.join(missing)} in {bin_dir}",
            todo="run ci/lint.sh, which makes an environment for them",
        )
    done = []
    for hook in hooks_for(files):
        ran = subprocess.run(
            [*hook.command, *hook.files],
            cwd=tree,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        done.append((hook.name, ran.returncode == 0, ran.stdout.strip()))
    return done


def main(argv: list[str]) -> int:
    """Run `kv.py hooks`; return 1 when a hook fails."""
    made = argparse.ArgumentParser(
        prog="kv.py hooks", description=(__doc__ or "").split("\n")[0]
    )
    made.add_argument("--tree", type=Path, help="assembled tree (default: build/vllm)")
    made.add_argument("files", nargs="*", help="default: all that the set touches")
    args = made.parse_args(argv)
    ps = load_patch_set(Path(__file__).resolve().parents[2])
    tree = args.tree or default_tree(ps)
    failed = 0
    for name, good, said in run_hooks(tree, args.files or ps.paths()):
        print(f"{'ok' if good else 'FAILED':<7} {name}", flush=True)
        if not good:
            failed += 1
            print("        " + said.replace("\n", "\n        "))
    return 1 if failed else 0
