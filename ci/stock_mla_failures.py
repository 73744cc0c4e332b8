# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin that tells a failure of vLLM's own backends from one of ours.

    PYTHONPATH=ci python -m pytest -p stock_mla_failures --judged-backend NAME FILES

tests/v1/attention/test_mla_backends.py runs every backend of the GPU in each test and
then fails once, naming the backends whose output was wrong. A test that fails without
naming a judged backend becomes an expected failure (xfail) whose reason has the names,
so that it is counted and shown. Any other failure stays one.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest

# What the tests' message says before the names.
MARK = " backend(s) failed: "


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption(
        "--judged-backend", default="", help="backends, comma separated; empty: all"
    )


def failed_backends(message: str) -> list[str]:
    """Return the names of the backends that a test's failure is about.

    Empty where the message isn't of that kind, or is cut.
    """
    first = message.strip().split("\n")[0].removeprefix("Failed: ")
    number, mark, names = first.partition(MARK)
    found = [name.strip().rpartition(".")[2] for name in names.split(",")]
    whole = number.isdecimal() and int(number) == len(found) and all(found)
    return found if mark and whole else []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a failure of other backends into an expected one."""
    report = yield
    judged = {n for n in item.config.getoption("--judged-backend").split(",") if n}
    if judged and report.when == "call" and report.failed and call.excinfo is not None:
        names = failed_backends(str(call.excinfo.value))
        if names and not judged & set(names):
            report.outcome = "skipped"
            report.wasxfail = f"vLLM's own: {', '.join(sorted(set(names)))} is wrong"
    return report
