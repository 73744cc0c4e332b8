# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin that limits vLLM's MLA comparison to some of its backends.

    PYTHONPATH=ci python -m pytest -p one_mla_backend --mla-backend NAME[,NAME] FILES

tests/v1/attention/test_mla_backends.py compares every backend that the GPU has inside
each test, so `-k` can't choose one. A backend that the file would not run here is an
error: nothing would be tested.
"""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption("--mla-backend", default="", help="backends, comma separated")


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Cut the files' lists of backends to the chosen ones.

    Raises:
        pytest.UsageError: A chosen backend isn't in a list, with what is.

    """
    wanted = [name for name in config.getoption("--mla-backend").split(",") if name]
    if not wanted:
        return
    modules = {getattr(item, "module", None) for item in items}
    for module in modules:
        backends = getattr(module, "BACKENDS_TO_TEST", None)
        if backends is None:
            continue
        names = [backend.name for backend in backends]
        if missing := [name for name in wanted if name not in names]:
            raise pytest.UsageError(
                f"--mla-backend: {', '.join(missing)} is not tested on this machine; "
                f"there are {', '.join(names) or 'none'}"
            )
        backends[:] = [backend for backend in backends if backend.name in wanted]
