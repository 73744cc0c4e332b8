#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
set -euo pipefail
# shellcheck source=scripts/common.sh
source "$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)/common.sh"

usage() {
  cat <<'TEXT'
usage: scripts/test.sh [--fast] [--junit DIR] [-- PYTEST OPTIONS]

Run the tests, after scripts/setup.sh --env-only:
  1. this repository's own tests, on tiny trees
  2. the tests that the overlay adds to vLLM, against the patched package; those that
     need a Hopper GPU skip with that reason where there is none, and the kernels are
     compiled for sm_90a anyway
  3. without a GPU: vLLM's own tests around what the patches touch, on the patched
     tree; any difference from what stock gives is a failure

  --fast       leave out part 3
  --junit DIR  write JUnit XML there
  --           further options of pytest, for part 2
TEXT
}

fast=0 junit=""
while [ $# -gt 0 ]; do
  case $1 in
    --fast) fast=1 ;;
    --junit)
      if [ $# -lt 2 ]; then die "--junit needs a folder"; fi
      mkdir -p "$2"
      junit=$(cd -- "$2" && pwd)
      shift
      ;;
    -h | --help) usage; exit 0 ;;
    --) shift; break ;;
    *) usage >&2; die "unknown option: $1" ;;
  esac
  shift
done

"$project/scripts/setup.sh" --env-only
kind=$(machine_kind)
python="$env_dir/bin/python"
stamp="$env_dir/.kvpatch-tests-$kind"
wanted=("$project/ci/requirements-test.txt" "$project/ci/requirements-kernels.txt")
if outdated "$stamp" "${wanted[@]}"; then
  step "what the tests need"
  "$python" -m pip install -qq --disable-pip-version-check --progress-bar off \
    -r "${wanted[0]}" -r "${wanted[1]}"
  touch "$stamp"
fi

results=()
part() { # NAME COMMAND...: run it, remember how it ended
  local name=$1 begin=$SECONDS code=0
  shift
  step "$name"
  ("$@") || code=$?
  # 5 is pytest's "no tests were collected": with these arguments, a failure too.
  results+=("$(printf '%-44s %s, %d s' "$name" "$([ "$code" = 0 ] && echo passed || echo "FAILED ($code)")" $((SECONDS - begin)))")
}

# shellcheck disable=SC2329 # called by name, through `part`
overlay_tests() {
  local files
  mapfile -t files < <(cd "$project/vllm_overlay" && find tests -name 'test_*.py' | sort)
  if [ "$kind" = cpu ]; then
    export VLLM_TARGET_DEVICE=cpu CUTE_DSL_ARCH=sm_90a
  fi
  cd "$(tests_root)"
  HF_HUB_OFFLINE=1 "$python" -m pytest -p no:cacheprovider -W ignore -q -rs --no-header \
    "${junit_option[@]}" "$@" "${files[@]}"
}

junit_option=()
if [ -n "$junit" ]; then junit_option=("--junitxml=$junit/repository.xml"); fi
part "this repository's tests" "$python" -m pytest -q --rootdir "$project" \
  -c "$project/pyproject.toml" "${junit_option[@]}" "$project/tests"
if [ -n "$junit" ]; then junit_option=("--junitxml=$junit/overlay.xml"); fi
part "the overlay's tests ($kind)" overlay_tests "$@"
if [ "$fast" = 0 ] && [ "$kind" = cpu ]; then
  if [ -n "$junit" ]; then junit_option=(--junit "$junit/upstream.xml"); fi
  part "vLLM's own tests, compared with stock" \
    "$python" "$project/scripts/kv.py" baseline "${junit_option[@]}"
fi

step "summary"
failed=0
for line in "${results[@]}"; do
  echo "  $line"
  case $line in *FAILED*) failed=1 ;; esac
done
exit "$failed"
