# SPDX-License-Identifier: Apache-2.0
"""UPSTREAM.toml: which vLLM the patch set is made for."""

from __future__ import annotations

import re
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


def check_hashes(pin: Pin) -> str:
    """Check that every sha256 of the pin can be one; return how many there are.

    Raises:
        PatchSetError: One isn't 64 hex digits.

    """
    hashes = {
        "[upstream] sdist_sha256": pin.sdist_sha256,
        "[upstream] wheel_x86_64_sha256": pin.wheel_sha256,
        **{f'[shadow] "{path}"': digest for path, digest in pin.shadow.items()},
    }
    bad = [
        f"{name} = {digest!r} ({len(str(digest))} characters)"
        for name, digest in hashes.items()
        if not re.fullmatch(r"[0-9a-f]{64}", str(digest))
    ]
    if bad:
        raise PatchSetError(
            "UPSTREAM.toml holds what is no sha256",
            got="\n".join(bad),
            allowed="64 hex digits, in lower case",
            todo="copy it anew: from the package index for a release, from sha256sum "
            "of upstream's file for [shadow]",
        )
    return f"{len(hashes)} of 64 hex digits"
