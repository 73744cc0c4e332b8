#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
set -euo pipefail
# shellcheck source=scripts/common.sh
source "$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../scripts" && pwd)/common.sh"

usage() {
  cat <<'TEXT'
usage: ci/gpu.sh [--out DIR] [--only PART,...]

Everything that needs a Hopper GPU, on a runner with Python and no container. Each part
leaves JUnit XML in DIR (default build/gpu); DIR/summary.md is the table, and is appended
to the file that GITHUB_STEP_SUMMARY names.

  tests      the overlay's and this repository's tests
  upstream   vLLM's own MLA backend and selector tests, which our patches extend
  engine     scripts/engine_check.py: backends compared through vLLM's engine
  serve      scripts/serve_check.py: the tiny model through the OpenAI endpoint
  main-job   scripts/demo.py
  bench      the kernel benchmark; ratios to FLASHMLA held to ci/baseline/gpu_ratios.json

Part by part, a failure doesn't stop the others. KVPATCH_ENV names an environment that
exists already.
TEXT
}

out="$project/build/gpu" only=tests,upstream,engine,serve,main-job,bench
while [ $# -gt 0 ]; do
  case $1 in
    --out | --only)
      if [ $# -lt 2 ]; then die "$1 needs a value"; fi
      if [ "$1" = --out ]; then out=$2; else only=$2; fi
      shift
      ;;
    -h | --help) usage; exit 0 ;;
    *) usage >&2; die "unknown option: $1" ;;
  esac
  shift
done
if [ "$(machine_kind)" != gpu ]; then
  die "this needs a Hopper GPU" "got:     no GPU of compute capability 9.0" \
    "to do:   run .ci/run on machines without one"
fi
mkdir -p "$out"
out=$(cd -- "$out" && pwd)
rm -f "$out"/*.xml "$out"/*.json "$out/summary.md"

"$project/scripts/setup.sh" --gpu --env-only
python="$env_dir/bin/python"
export PATH="$env_dir/bin:$PATH"

wanted() { case ",$only," in *",$1,"*) return 0 ;; *) return 1 ;; esac; }
case_of() { # NAME COMMAND...
  local name=$1
  shift
  step "$name"
  "$python" "$project/ci/run_case.py" --junit "$out" "$name" -- "$@" || true
}

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv | tee "$out/gpu.csv"

if wanted tests; then
  "$project/scripts/test.sh" --fast --junit "$out" || true
fi
if wanted upstream; then
  step "vLLM's own tests"
  "$python" -m pip install -qq -r "$project/ci/requirements-test.txt"
  (cd "$(tests_root)" && "$python" -m pytest -q -p no:cacheprovider --junitxml="$out/upstream.xml" \
    tests/v1/attention/test_mla_backends.py \
    tests/kernels/attention/test_attention_selector.py \
    tests/test_attention_backend_registry.py) || true
fi
if wanted engine; then
  case_of engine "$python" "$project/scripts/engine_check.py" --dspark --out "$out/engine"
fi
if wanted serve && [ -e "$project/scripts/serve_check.py" ]; then
  case_of serve "$python" "$project/scripts/serve_check.py" --out "$out/serve"
fi
if wanted main-job; then
  case_of main-job "$python" "$project/scripts/demo.py" --lengths 524288,2048x63
fi
bench="$project/vllm_overlay/benchmarks/kernels/benchmark_kimi_k3_kv_balanced_mla.py"
if wanted bench && [ -e "$bench" ]; then
  case_of bench "$python" "$bench" --ratios "$out/ratios.json"
  if [ -e "$project/ci/baseline/gpu_ratios.json" ]; then
    case_of bench-ratios "$python" "$project/ci/check_ratios.py" "$out/ratios.json" \
      "$project/ci/baseline/gpu_ratios.json"
  fi
fi

step "summary"
code=0
"$python" "$project/ci/summary.py" "$out" --title "$(tail -n 1 "$out/gpu.csv")" \
  >"$out/summary.md" || code=$?
cat "$out/summary.md"
if [ -n "${GITHUB_STEP_SUMMARY:-}" ]; then cat "$out/summary.md" >>"$GITHUB_STEP_SUMMARY"; fi
exit "$code"
