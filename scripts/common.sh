# shellcheck shell=bash
# SPDX-License-Identifier: Apache-2.0
# Shared by the scripts: where the project is, which interpreter, what machine this is.

project=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck disable=SC2034 # used by those that source this
env_dir=${KVPATCH_ENV:-$project/.venv}
started=$SECONDS

step() {
  printf '\n==> [%4ds] %s\n' "$((SECONDS - started))" "$*"
}

die() {
  printf 'error: %s\n' "$1" >&2
  shift
  for line in "$@"; do printf '  %s\n' "$line" >&2; done
  exit 1
}

# Print an interpreter of version 3.11 or newer.
find_python() {
  local tried=() name
  for name in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11; do
    if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$name"
      return
    fi
    tried+=("$name")
  done
  die "no Python 3.11 or newer" "tried:   ${tried[*]}" \
    "to do:   install one, or name it with PYTHON=/path/to/python"
}

# Make a virtual environment: make_env PYTHON DIR. Some systems ship Python without the
# part of venv that brings pip along.
make_env() {
  "$1" -m venv "$2" >/dev/null 2>&1 && return
  if "$1" -m venv --without-pip "$2" &&
    "$1" -m pip --python "$2/bin/python" install -qq --disable-pip-version-check pip; then
    return
  fi
  die "the environment can't be made" "folder:  $2" "python:  $1" \
    "to do:   install its venv module (Debian: python3-venv) or pip"
}

# Succeed unless a stamp file is there and newer than all the files it stands for.
outdated() {
  local stamp=$1
  shift
  [ ! -e "$stamp" ] || [ -n "$(find "$@" -newer "$stamp")" ]
}

# Print a folder with vLLM's tests but without its package, so that tests import the
# installed one.
tests_root() {
  local root="$project/build/tests-root"
  mkdir -p "$root"
  ln -sfn ../vllm/tests "$root/tests"
  ln -sfn ../vllm/benchmarks "$root/benchmarks"
  cp "$project/build/vllm/pyproject.toml" "$root/pyproject.toml"
  echo "$root"
}

# Print "gpu" for a machine with a Hopper GPU, else "cpu".
machine_kind() {
  if command -v nvidia-smi >/dev/null &&
    nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | grep -qx '9\.0'; then
    echo gpu
  else
    echo cpu
  fi
}
