#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Lint everything that works without a network beyond the package index: this
# repository with its own rules, the overlay inside the assembled tree with vLLM's.
# Options: --quick leaves out what needs the assembled tree and an environment.
set -euo pipefail
# shellcheck source=scripts/common.sh
source "$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../scripts" && pwd)/common.sh"

quick=0
case ${1:-} in
  "") ;;
  --quick) quick=1 ;;
  -h | --help) sed -n '3,5s/^# //p' "${BASH_SOURCE[0]}"; exit 0 ;;
  *) die "unknown option: $1" "allowed: --quick" ;;
esac

tools="${KVPATCH_LINT_ENV:-$project/.venv-lint}"
if outdated "$tools/.complete" "$project/ci/requirements-lint.txt"; then
  step "the linters, in $tools"
  make_env "$(find_python)" "$tools"
  "$tools/bin/python" -m pip install -qq --disable-pip-version-check \
    -r "$project/ci/requirements-lint.txt"
  touch "$tools/.complete"
fi

failed=()
check() { # NAME COMMAND...
  local name=$1
  shift
  step "$name"
  "$@" || failed+=("$name")
}

cd "$project"
mapfile -t shells < <(git ls-files '*.sh' .ci/run)
check "ruff: this repository" "$tools/bin/ruff" check scripts tests ci
check "ruff format: this repository" "$tools/bin/ruff" format --check scripts tests ci
check "mypy: this repository" env MYPYPATH=scripts "$tools/bin/mypy" scripts ci
check "typos: this repository" "$tools/bin/typos"
check "shellcheck" "$tools/bin/shellcheck" -x "${shells[@]}"

if [ "$quick" = 0 ]; then
  "$project/scripts/setup.sh" --env-only
  check "vLLM's hooks on the overlay and on what is patched" \
    "$tools/bin/python" scripts/kv.py hooks
fi

step "summary"
if [ ${#failed[@]} -gt 0 ]; then
  printf '  FAILED: %s\n' "${failed[@]}"
  exit 1
fi
echo "  lint passed"
