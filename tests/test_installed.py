# SPDX-License-Identifier: Apache-2.0
"""The pinned release, installed in an environment: apply, provenance, reverse."""

import base64
import csv
import hashlib
import importlib.metadata
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from kvpatch.patchset import load_patch_set

ROOT = Path(__file__).resolve().parents[1]
MEMBER = "KIMI_K3_KV_BALANCED_MLA"


def site() -> Path:
    """Return the folder of this Python's vllm, or skip."""
    try:
        dist = importlib.metadata.distribution("vllm")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("vllm isn't installed for this Python (scripts/setup.sh does it)")
    if dist.version.split("+")[0] != load_patch_set(ROOT).pin.version:
        pytest.skip(f"the installed vllm is {dist.version}, not the pinned one")
    return Path(str(dist.locate_file("")))


@pytest.fixture(scope="module")
def env(tmp_path_factory):
    """A virtual environment that holds a copy of the installed package alone."""
    source = site()
    root = tmp_path_factory.mktemp("env")
    made = [sys.executable, "-m", "venv", "--without-pip", str(root)]
    subprocess.run(made, check=True, capture_output=True)
    dest = next(root.glob("lib/python*/site-packages"))
    for path in [source / "vllm", *source.glob("vllm-*.dist-info")]:
        junk = shutil.ignore_patterns("__pycache__", "*.so", "vllm-rs")
        shutil.copytree(path, dest / path.name, ignore=junk)
    return root / "bin" / "python", dest


def apply(env, *args):
    variables = dict(os.environ, PYTHON=str(env[0]))
    # It would put this Python's own vllm before the environment's copy.
    variables.pop("PYTHONPATH", None)
    return subprocess.run(
        [ROOT / "scripts/apply.sh", "--installed", *args],
        env=variables,
        capture_output=True,
        text=True,
    )


def differing(dest: Path) -> set[str]:
    """Return the files that differ from the installer's own record."""
    record = next(dest.glob("vllm-*.dist-info")) / "RECORD"
    listed, bad = set(), set()
    with open(record) as file:
        for name, digest, _ in csv.reader(file):
            path = dest / name
            if not name.startswith("vllm/") or not path.exists() or not digest:
                continue
            listed.add(name)
            found = hashlib.sha256(path.read_bytes()).digest()
            text = base64.urlsafe_b64encode(found).rstrip(b"=").decode()
            if digest != f"sha256={text}":
                bad.add(name)
    ours = {p.relative_to(dest).as_posix() for p in (dest / "vllm").rglob("*.py")}
    return bad | (ours - listed)


def test_apply_status_reverse_and_an_upgrade(env):
    dest, ps = env[1], load_patch_set(ROOT)
    paths = set(ps.paths(lambda path: path.startswith("vllm/")))
    # The copy has the files of a patched package, but not the record beside it.
    ran = apply(env, "--reverse")
    assert ran.returncode == 0, ran.stderr
    assert differing(dest) == set()
    assert "applicable" in apply(env, "--check").stdout

    ran = apply(env)
    assert ran.returncode == 0, ran.stderr
    assert differing(dest) == {p for p in paths if p.endswith(".py")}
    facts = json.loads(apply(env, "--status", "--json").stdout)
    assert facts["state"] == "patched" and facts["kind"] == "installed package"
    assert facts["applied_patch_set"] == ps.ident
    assert {f["path"] for f in facts["files"]} == paths
    assert [p["sha256"] for p in facts["applied_patches"]] == [
        p.sha256 for p in ps.patches
    ]
    assert "nothing changed" in apply(env).stdout

    info = next(dest.glob("vllm-*.dist-info"))
    moved = info.rename(dest / "vllm-0.33.1.dist-info")
    text = (moved / "METADATA").read_text()
    (moved / "METADATA").write_text(text.replace("Version: 0.33.0", "Version: 0.33.1"))
    said = apply(env, "--status")
    assert said.returncode == 1 and "replaced underneath" in said.stdout
    ran = apply(env)
    assert ran.returncode == 1 and "another version" in ran.stderr
    (moved / "METADATA").write_text(text)
    moved.rename(info)

    assert apply(env, "--reverse").returncode == 0
    assert differing(dest) == set()


def resolve(queue):
    """Run in a fresh process: what does the name stand for?"""
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    cls = AttentionBackendEnum[MEMBER].get_class()
    queue.put((f"{cls.__module__}.{cls.__qualname__}", cls.get_name()))


def test_a_worker_started_by_spawn_resolves_the_backend():
    """VLLM's workers are spawned: nothing of the parent's state reaches them."""
    where = site()
    if not (where / ".kv-balanced-mla/record.json").exists():
        pytest.skip("the installed vllm isn't patched (scripts/setup.sh does it)")
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    worker = context.Process(target=resolve, args=(queue,))
    worker.start()
    path, name = queue.get(timeout=120)
    worker.join()
    assert path.startswith(load_patch_set(ROOT).pin.registry[0].module + ".")
    assert name == MEMBER
