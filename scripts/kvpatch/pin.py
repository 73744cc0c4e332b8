# SPDX-License-Identifier: Apache-2.0
"""UPSTREAM.toml: which vLLM the patch set is made for."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from .errors import PatchSetError


@dataclass(frozen=True)
class RegistryEntry:
    """A backend name that must resolve after the patches.

    Attributes:
        file: Registry source, relative to the tree's root.
        enum: Name of the enum class in it.
        member: The backend's name.
        module: Module that must hold the backend's class.

    """

    file: str
    enum: str
    member: str
    module: str


@dataclass(frozen=True)
class Pin:
    """The pinned upstream release.

    Attributes:
        project: Name on the package index.
        version: Exact version.
        tag: Git tag of that version.
        sdist_sha256: Hash of the source release.
        wheel_sha256: Hash of the x86_64 wheel.
        shadow: Upstream files that the overlay replaces, with their sha256.
        registry: Names that must resolve in the patched tree.

    """

    project: str
    version: str
    tag: str
    sdist_sha256: str
    wheel_sha256: str
    shadow: dict[str, str] = field(default_factory=dict)
    registry: tuple[RegistryEntry, ...] = ()


def load_pin(project_root: Path) -> Pin:
    """Read UPSTREAM.toml.

    Raises:
        PatchSetError: It is missing, unreadable or lacks a value.

    """
    path = project_root / "UPSTREAM.toml"
    try:
        data = tomllib.loads(path.read_text())
        up = data["upstream"]
        return Pin(
            project=up["project"],
            version=up["version"],
            tag=up["tag"],
            sdist_sha256=up["sdist_sha256"],
            wheel_sha256=up["wheel_x86_64_sha256"],
            shadow=dict(data.get("shadow", {})),
            registry=tuple(RegistryEntry(**e) for e in data.get("registry", [])),
        )
    except (OSError, tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise PatchSetError(
            "the pin can't be read",
            got=f"{path}: {type(error).__name__}: {error}",
            allowed="the tables [upstream], [[registry]] and [shadow]",
        ) from error
