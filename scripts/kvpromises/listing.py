# SPDX-License-Identifier: Apache-2.0
"""ci/promises.toml, and whether what it names exists."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path
from typing import Any

OTHER_CHECKS = ("soak", "memcheck", "racecheck", "sanitizer-sees")


class Listing:
    """The promises, the files of their tests and the processes that run these.

    Args:
        path: ci/promises.toml.
        folder: Where the test files are.
        plan_checks: Names of the planner's checks, which are no test functions.

    """

    def __init__(self, path: Path, folder: Path, plan_checks: list[str]) -> None:
        read = tomllib.loads(path.read_text())
        self.folder = folder
        self.files: dict[str, str] = read["files"]
        self.processes: list[dict[str, Any]] = read["process"]
        self.promises: list[dict[str, Any]] = read["promise"]
        self.plan_checks = plan_checks

    def process(self, name: str) -> dict[str, Any]:
        """Return a process's entry."""
        return next(entry for entry in self.processes if entry["name"] == name)

    def names_of(
        self, entry: dict[str, Any], alias: str, every: list[str]
    ) -> list[str]:
        """Return the test names that a process runs of one file; ``*`` means all."""
        names = [t.split("::")[1] for t in entry["tests"] if t.startswith(alias + "::")]
        return every if "*" in names else names

    def tests_in(self, alias: str) -> list[str]:
        """Return the names of a file's test functions."""
        if alias == "plan_gpu":
            return self.plan_checks
        tree = ast.parse((self.folder / self.files[alias]).read_text())
        return [
            node.name
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        ]

    def on_gpu(self) -> dict[str, str]:
        """Return the process of every test that runs on the GPU."""
        return {
            f"{alias}::{name}": entry["name"]
            for entry in self.processes
            for alias in dict.fromkeys(t.split("::")[0] for t in entry["tests"])
            for name in self.names_of(entry, alias, self.tests_in(alias))
        }

    def problems(self) -> list[str]:
        """Return what the list names and does not exist, and what no promise names."""
        exist = {f"{a}::{n}" for a in self.files for n in self.tests_in(a)}
        on_gpu = self.on_gpu()
        gpu_files = {name.split("::")[0] for name in on_gpu}
        found, named = [], set()
        for promise in self.promises:
            for test in promise["tests"]:
                named.add(test)
                if test not in exist and test not in OTHER_CHECKS:
                    found.append(f"no such test: {test} ({promise['text'][:50]})")
                elif test.split("::")[0] in gpu_files and test not in on_gpu:
                    found.append(f"no process runs {test}")
        found += [f"no promise names {test}" for test in on_gpu if test not in named]
        return found
