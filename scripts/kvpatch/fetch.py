# SPDX-License-Identifier: Apache-2.0
"""Fetch the pinned release through pip, as pip is configured here.

``pip download`` would build the release's metadata, which needs its whole build
environment. The finder and the downloader behind that command need nothing, and
honour the same configuration: index, extra indexes, find-links, proxy,
certificates and credentials. This file therefore also runs as a program of its
own inside any Python that has pip.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:
    from .pin import Pin

try:
    from .errors import PatchSetError
except ImportError:  # run as a program by another interpreter
    PatchSetError = RuntimeError  # type: ignore[assignment, misc]


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file as 64 hex digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cache_dir() -> Path:
    """Return the folder that keeps downloads between runs.

    ``KVPATCH_CACHE`` wins; otherwise it lies in the user's cache folder.
    """
    if named := os.environ.get("KVPATCH_CACHE"):
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "vllm-kv-balanced-mla"


def python_with_pip(workdir: Path) -> str:
    """Return an interpreter that can import pip; make one if need be.

    Args:
        workdir: Where a throw-away environment may be created.

    Raises:
        PatchSetError: There is neither pip nor a working ``venv`` module.

    """
    probe = [sys.executable, "-c", "import pip"]
    if subprocess.run(probe, capture_output=True).returncode == 0:
        return sys.executable
    env = workdir / "pipenv"
    made = subprocess.run(
        [sys.executable, "-m", "venv", str(env)], capture_output=True, text=True
    )
    if made.returncode:
        raise PatchSetError(
            "the source release can't be fetched: this Python has no pip",
            got=made.stderr.strip()[-400:] or made.stdout.strip()[-400:],
            allowed=f"pip for {sys.executable}, or its venv module",
            todo="install pip or python3-venv, or pass the file with --sdist",
        )
    return str(env / "bin" / "python")


def pip_fetch(requirement: str, sha256: str, dest: Path, wheel: bool) -> int:
    """Download one file of a release with pip's finder (runs beside pip).

    Args:
        requirement: ``name==version``.
        sha256: The file's hash; links that carry another hash are passed over.
        dest: Folder to put the file into.
        wheel: Take a wheel, not the source release.

    Returns:
        0 when a file arrived, 3 when the index offers none.

    """
    from pip._internal.commands import create_command
    from pip._internal.network.download import Downloader

    name, _, version = requirement.partition("==")
    command: Any = create_command("download")
    options, _ = command.parse_args(["--no-deps", requirement])
    with command.main_context():
        session = command.get_default_session(options)
        finder = command._build_package_finder(options, session)
        links = [
            c.link
            for c in finder.find_all_candidates(name)
            if str(c.version) == version and c.link.is_wheel == wheel
        ]
        exact = [k for k in links if k.hash_name == "sha256" and k.hash == sha256]
        for link in exact or links:
            fetch: Any
            try:
                fetch = Downloader(session, "on")
            except TypeError:  # newer pip also takes the number of resumptions
                fetch = cast(Any, Downloader)(session, "on", 5)
            fetch(link, str(dest))
            return 0
    return 3


def fetch_release(
    pin: Pin, wheel: bool = False, given: Path | None = None, out: TextIO | None = None
) -> Path:
    """Return a file of the pinned release, from the cache where it is already.

    Args:
        pin: The release.
        wheel: The x86_64 wheel instead of the source release.
        given: A file that the user already has, or None.
        out: Where progress is told; standard output by default.

    Returns:
        The file, its hash checked.

    Raises:
        PatchSetError: It can't be had, or its hash is not the pinned one.

    """
    sha256 = pin.wheel_sha256 if wheel else pin.sdist_sha256
    what = f"the {pin.project} {pin.version} {'wheel' if wheel else 'source release'}"
    if given is not None:
        if not given.is_file():
            raise PatchSetError(
                f"the file given with {'--wheel' if wheel else '--sdist'} isn't there",
                got=str(given),
                allowed=f"{what} ({'.whl' if wheel else '.tar.gz'})",
                todo="check the path, or leave it out to fetch the file",
            )
        _check_hash(given, sha256)
        return given
    store = cache_dir() / sha256[:16]
    for kept in sorted(store.glob("*")):
        if sha256_of(kept) == sha256:
            return kept
        print(f"cached {kept} is damaged: fetching it again", file=out, flush=True)
        kept.unlink()
    store.mkdir(parents=True, exist_ok=True)
    print(f"fetching {what} through pip", file=out, flush=True)
    with tempfile.TemporaryDirectory(dir=store.parent) as tmp:
        work = Path(tmp)
        dest = work / "files"
        dest.mkdir()
        python = python_with_pip(work)
        own = [python, str(Path(__file__)), f"{pin.project}=={pin.version}"]
        own += [sha256, str(dest), "wheel" if wheel else "sdist"]
        # A folder of its own: no package beside the reader's files is imported.
        ran = subprocess.run(
            own, cwd=work, stdout=out, stderr=subprocess.PIPE, text=True
        )
        if ran.returncode or not any(dest.iterdir()):
            _fetch_by_command(python, pin, wheel, dest, ran.stderr)
        got = next(dest.iterdir())
        _check_hash(got, sha256)
        kept = store / got.name
        os.replace(got, kept)
    print(f"kept as {kept}", file=out, flush=True)
    return kept


def cached_member(pin: Pin, path: str) -> bytes | None:
    """Return a file of the pinned source release, if the release is in the cache."""
    for kept in sorted((cache_dir() / pin.sdist_sha256[:16]).glob("*")):
        if sha256_of(kept) != pin.sdist_sha256:
            continue
        with tarfile.open(kept) as tar:
            for member in tar:
                if member.isfile() and member.name.partition("/")[2] == path:
                    file = tar.extractfile(member)
                    return file.read() if file else None
    return None


def fetch_any(project: str, version: str) -> Path:
    """Return the source release of any version, for comparison only: no hash is known.

    Raises:
        PatchSetError: The index gives none.

    """
    store = cache_dir() / f"unpinned-{version}"
    for kept in sorted(store.glob("*.tar.gz")):
        return kept
    store.mkdir(parents=True, exist_ok=True)
    print(f"fetching the {project} {version} source release through pip", flush=True)
    with tempfile.TemporaryDirectory(dir=store.parent) as tmp:
        work = Path(tmp)
        dest = work / "files"
        dest.mkdir()
        python = python_with_pip(work)
        own = [python, str(Path(__file__)), f"{project}=={version}", "", str(dest)]
        ran = subprocess.run([*own, "sdist"], cwd=work, capture_output=True, text=True)
        got = next(dest.iterdir(), None)
        if ran.returncode or got is None:
            raise PatchSetError(
                f"the package index gave no source release of {project} {version}",
                got=ran.stderr.strip()[-300:] or "no such version",
                todo="check the version, or pass a folder",
            )
        kept = store / got.name
        os.replace(got, kept)
    return kept


def _fetch_by_command(
    python: str, pin: Pin, wheel: bool, dest: Path, first_error: str
) -> None:
    """Second way: the public ``pip download``, in pip's own build environment."""
    env = dict(os.environ, VLLM_TARGET_DEVICE="empty", VLLM_SKIP_VERSION_SUFFIX="1")
    form = "--only-binary" if wheel else "--no-binary"
    what = [f"{pin.project}=={pin.version}", "--no-deps", form, pin.project]
    ran = subprocess.run(
        [python, "-m", "pip", "download", *what, "-d", str(dest)],
        capture_output=True,
        text=True,
        env=env,
        cwd=dest,
    )
    if not any(dest.iterdir()):
        tails = [t.strip()[-300:] for t in (first_error, ran.stderr) if t.strip()]
        raise PatchSetError(
            f"the package index gave no {form[2:]} file of {pin.project} {pin.version}",
            got="\n".join(tails) or "no error text from pip",
            allowed="an index that carries it (pip config list shows yours)",
            todo="check the network and pip's configuration, or pass --sdist FILE",
        )


def _check_hash(path: Path, sha256: str) -> None:
    found = sha256_of(path)
    if found != sha256:
        raise PatchSetError(
            f"{path.name} is not the pinned file",
            got=f"sha256 {found}",
            allowed=f"sha256 {sha256} (UPSTREAM.toml)",
            todo="fetch it again; if the index really serves another file, stop",
        )


def _extract(tar: tarfile.TarFile, dest: Path) -> None:
    if hasattr(tarfile, "data_filter"):
        tar.extractall(dest, filter="data")
        return
    # Early 3.11 has no filters. The archive's hash is pinned, so a path that
    # leaves the folder can only mean a wrong pin.
    for member in tar.getmembers():
        parts = Path(member.name).parts
        if member.name.startswith("/") or ".." in parts:
            raise PatchSetError(
                "the archive writes outside of its folder", got=member.name
            )
    tar.extractall(dest)


def unpack(sdist: Path, dest: Path) -> None:
    """Unpack a source release into `dest`, without its top folder, all or nothing.

    Raises:
        PatchSetError: The archive doesn't hold one top folder.

    """
    dest.parent.mkdir(parents=True, exist_ok=True)
    tmp = Path(tempfile.mkdtemp(prefix=f".{dest.name}-", dir=dest.parent))
    try:
        with tarfile.open(sdist) as tar:
            _extract(tar, tmp)
        tops = list(tmp.iterdir())
        if len(tops) != 1 or not tops[0].is_dir():
            raise PatchSetError(
                f"{sdist.name} isn't laid out like a source release",
                got=", ".join(sorted(t.name for t in tops)[:5]) or "nothing",
                allowed="one top folder",
            )
        os.replace(tops[0], dest)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


def main(argv: list[str]) -> int:
    """Run `kv.py fetch`: print the path of the release's file, progress aside."""
    from .pin import check_hashes, load_pin

    made = argparse.ArgumentParser(prog="kv.py fetch", description=main.__doc__)
    made.add_argument("--wheel", action="store_true", help="the x86_64 wheel")
    args = made.parse_args(argv)
    pin = load_pin(Path(__file__).resolve().parents[2])
    check_hashes(pin)
    print(fetch_release(pin, args.wheel, out=sys.stderr))
    return 0


if __name__ == "__main__":
    sys.exit(
        pip_fetch(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4] == "wheel")
    )
