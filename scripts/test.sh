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
  3. without a GPU, on Linux and x86-64: the tests around Triton kernels again, in
     Triton's interpreter, and the sparse backend's kernels compiled for sm_90a, with
     registers, spills and shared memory; Triton goes to build/triton (0.9 GB)
  4. without a GPU: vLLM's own tests around what the patches touch, on the patched
     tree; any difference from what stock gives is a failure

  --fast       leave out part 4
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

# Triton alone, in a folder of its own: the environment stays without it.
# shellcheck disable=SC2329 # called by `triton_tests`
install_triton() {
  local stamp
  stamp="$triton/.complete-$("$python" -c 'import sys; print(*sys.version_info[:2], sep=".")')"
  if outdated "$stamp" "$project/ci/requirements-triton.txt"; then
    rm -rf "$triton"
    "$python" -m pip install -qq --disable-pip-version-check --progress-bar off \
      --no-deps --target "$triton" -r "$project/ci/requirements-triton.txt" &&
      touch "$stamp"
  fi
}

# shellcheck disable=SC2329 # called by name, through `part`
triton_tests() { # INTERPRET TEST...
  local interpret=$1 log="$triton.log"
  shift
  install_triton || return
  cd "$(tests_root)" || return
  # vLLM takes Triton without a GPU where no device is visible.
  PYTHONPATH="$triton${PYTHONPATH:+:$PYTHONPATH}" TRITON_INTERPRET=$interpret \
    CUDA_VISIBLE_DEVICES='' VLLM_TARGET_DEVICE=cpu HF_HUB_OFFLINE=1 \
    "$python" -m pytest -p no:cacheprovider -W ignore -q -rs --no-header \
    "${junit_option[@]}" "$@" | tee "$log" || return
  if grep -q '^SKIPPED' "$log"; then
    echo "error: a test skipped that is here to run; see its reason above" >&2
    return 1
  fi
}

junit_option=()
if [ -n "$junit" ]; then junit_option=("--junitxml=$junit/repository.xml"); fi
part "this repository's tests" "$python" -m pytest -q --rootdir "$project" \
  -c "$project/pyproject.toml" "${junit_option[@]}" "$project/tests"
if [ -n "$junit" ]; then junit_option=("--junitxml=$junit/overlay.xml"); fi
part "the overlay's tests ($kind)" overlay_tests "$@"
triton="$project/build/triton"
tests=tests/v1/attention/test_
sparse=${tests}flashinfer_mla_sparse_sm90
if [ "$kind" = cpu ] && [ "$(uname -sm)" = "Linux x86_64" ]; then
  if [ -n "$junit" ]; then junit_option=("--junitxml=$junit/triton-interpreted.xml"); fi
  # The deselected test starts the same ones.
  part "Triton kernels, in its interpreter" triton_tests 1 \
    --deselect "${sparse}_plan.py::test_in_the_interpreter" "${sparse}_plan.py" \
    "${sparse}_backend.py" "${tests}kimi_k3_kv_balanced_mla_dcp.py"
  if [ -n "$junit" ]; then junit_option=("--junitxml=$junit/triton-compiled.xml"); fi
  part "Triton kernels, compiled for sm_90a" triton_tests 0 "${sparse}_compile.py"
fi
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
