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
  upstream   vLLM's own MLA backend and selector tests, which our patches extend, with
             model configs of ci/offline_hub.py instead of the hub's
  upstream-quick  of these, what runs this backend; not in the default list
  engine     scripts/engine_check.py: backends compared through vLLM's engine
  serve      scripts/serve_check.py: the tiny model through the OpenAI endpoint
  main-job   scripts/demo.py
  bench      the kernel benchmark with its figure; ratios to FLASHMLA held to
             ci/baseline/gpu_ratios.json; the accuracy table
  promises   scripts/promises.py: the tests behind docs/promises.md, sanitizer and soak
  sparse     the sparse backend: its GPU checks, its benchmark, scripts/sparse_check.py
  timing     scripts/engine_timing.py: decode steps of the engine against stock's
  two-gpus   scripts/two_gpu_check.py, where there are two Hopper GPUs

The GPUs are those that CUDA_VISIBLE_DEVICES names, else every one of compute capability
9.0. Of several, engine and timing use two, two-gpus too, and the other parts the first.

Part by part, a failure doesn't stop the others, and each has a time limit. SIGINT or
SIGTERM ends the part that runs; the others are left out, and said so. KVPATCH_ENV
names an environment that exists already. If it has vLLM and wasn't made by
scripts/setup.sh, nothing is installed into it, and no network is needed; what is left
out for that is said.
TEXT
}

out="$project/build/gpu"
only=tests,upstream,engine,serve,main-job,bench,promises,sparse,timing,two-gpus
parts="$only,upstream-quick"
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
IFS=, read -ra asked <<<"$only"
unknown=()
for part in "${asked[@]}"; do
  case ",$parts," in
    *",$part,"*) ;;
    *) unknown+=("'$part'") ;;
  esac
done
if [ ${#asked[@]} = 0 ]; then unknown=("''"); fi
if [ ${#unknown[@]} -gt 0 ]; then
  die "--only names what is no part" "got:     ${unknown[*]}" "allowed: ${parts//,/, }" \
    "to do:   name parts with commas between them and no spaces; see --help"
fi
if [ "$(machine_kind)" != gpu ]; then
  die "this needs a Hopper GPU" "got:     no GPU of compute capability 9.0" \
    "to do:   run .ci/run on machines without one"
fi
mkdir -p "$out"
out=$(cd -- "$out" && pwd)
wanted() { case ",$only," in *",$1,"*) return 0 ;; *) return 1 ;; esac; }
rm -f "$out"/*.xml "$out"/*.json "$out/bench.png" "$out/summary.md" \
  "$out/promises/promises.json" "$out/timing/engine_timing.md" \
  "$out/two-gpus/two_gpu_check.md"
# A runner keeps build/ between runs: what a part left then is no result of this run.
# Without gpu.csv the folder is somebody's own, of which nothing may go.
if [ -e "$out/gpu.csv" ]; then
  for part in engine serve promises sparse timing two-gpus; do
    if wanted "$part"; then rm -rf "${out:?}/$part"; fi
  done
  if wanted sparse; then rm -rf "$out/sparse-engine"; fi
fi
python="$env_dir/bin/python"

# -P: packages of the current folder are not the environment's.
has() { "$python" -P -c 'import importlib.util, sys
sys.exit(importlib.util.find_spec(sys.argv[1]) is None)' "$1" 2>/dev/null; }
# With pytest-xdist, because most of the GPU tests' time is the processor's.
spread=()
spread_tests() {
  local cores
  cores=$(nproc)
  if has xdist; then spread=(-n "$((cores < 4 ? 1 : cores > 32 ? 16 : cores / 2))"); fi
}
stopped="" child="" last_code=0 lost=()
# shellcheck disable=SC2329  # the trap calls it
stop() {
  stopped=yes
  if [ -n "$child" ]; then kill -TERM "$child" 2>/dev/null || true; fi
}
trap stop INT TERM
case_of() { # NAME SECONDS COMMAND...; last_code tells how it ended
  local name=$1 limit=$2
  shift 2
  last_code=0
  if [ -n "$stopped" ]; then
    # A second interrupt may end this too; the summary is still due.
    skip_case "$name" "this run was interrupted" || true
    last_code=130
    return
  fi
  step "$name (at most $limit s)"
  # In the background, because a trap waits for what runs in the foreground.
  "$python" "$project/ci/run_case.py" --junit "$out" --limit "$limit" "$name" -- "$@" &
  child=$!
  wait "$child" || last_code=$?
  while kill -0 "$child" 2>/dev/null; do
    last_code=0
    wait "$child" || last_code=$?
  done
  child=""
  # The summary reads the XML, so it can't tell of a case that left none.
  if [ ! -e "$out/$name.xml" ]; then lost+=("$name"); fi
}
skip_case() { # NAME REASON
  step "$1"
  "$python" "$project/ci/run_case.py" --junit "$out" --skip "$2" "$1"
}

# An environment that somebody else made: it has vLLM, and no stamp of setup.sh.
own=0 tree=1
if [ -n "${KVPATCH_ENV:-}" ] && [ -x "$python" ] && has vllm &&
  ! compgen -G "$env_dir/.kvpatch-*" >/dev/null; then
  own=1
fi
if [ "$own" = 0 ]; then
  "$project/scripts/setup.sh" --gpu --env-only
else
  step "skipped: installing; $env_dir has vLLM and was not made by scripts/setup.sh"
  step "the patched package in the environment"
  PYTHON="$python" "$project/scripts/apply.sh" --installed
  step "the patched source tree in build/vllm"
  if ! PIP_RETRIES=0 PIP_DEFAULT_TIMEOUT=10 PYTHON="$python" \
    "$project/scripts/apply.sh" --no-import; then
    tree=0
    step "skipped: the source tree, whose release could not be fetched (KVPATCH_CACHE can hold it)"
  fi
fi
export PATH="$env_dir/bin:$PATH"
no_tree="there is no source tree in build/vllm"
stock=$("$python" -P - <<'PY'
import importlib.util
from pathlib import Path

found = importlib.util.find_spec("vllm")
site = Path(found.submodule_search_locations[0]).parent
name = "vllm/v1/attention/backends/mla/flashinfer_mla_sparse_sm90.py"
print(site / ".kv-balanced-mla" / "stock" / name)
PY
)

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv | tee "$out/gpu.csv"
# The parts' scripts take nvidia-smi's numbers, which count by the bus.
export CUDA_DEVICE_ORDER=PCI_BUS_ID
if [ -z "${CUDA_VISIBLE_DEVICES:-}" ]; then
  CUDA_VISIBLE_DEVICES=$(nvidia-smi --query-gpu=index,compute_cap --format=csv,noheader |
    sed -n 's/, *9\.0$//p' | paste -sd, -)
  export CUDA_VISIBLE_DEVICES
fi
hoppers=$(tr , '\n' <<<"$CUDA_VISIBLE_DEVICES" | wc -l)
first=${CUDA_VISIBLE_DEVICES%%,*}
two=$(cut -d, -f1,2 <<<"$CUDA_VISIBLE_DEVICES")

if wanted tests && [ "$own" = 0 ]; then
  case_of tests 1800 "$project/scripts/test.sh" --fast --junit "$out"
elif wanted tests; then
  step "skipped: what ci/requirements-test.txt and requirements-kernels.txt would install"
  if has pytest; then
    case_of repository-tests 600 "$python" -m pytest -q --rootdir "$project" \
      -c "$project/pyproject.toml" --junitxml="$out/repository.xml" "$project/tests"
    if [ "$tree" = 1 ]; then
      mapfile -t files < <(cd "$project/vllm_overlay" && find tests -name 'test_*.py' | sort)
      cd "$(tests_root)"
      spread_tests
      HF_HUB_OFFLINE=1 case_of overlay-tests 1800 "$python" -m pytest -p no:cacheprovider \
        -W ignore -q -rs --no-header --junitxml="$out/overlay.xml" \
        "${spread[@]}" ${spread:+--dist loadfile} "${files[@]}"
      cd "$project"
    else
      skip_case overlay-tests "$no_tree"
    fi
  else
    skip_case tests "the environment has no pytest"
  fi
fi
no_upstream=""
if [ "$tree" = 0 ]; then
  no_upstream=$no_tree
elif wanted upstream || wanted upstream-quick; then
  if [ "$own" = 0 ]; then
    case_of upstream-packages 600 "$python" -m pip install -qq \
      --disable-pip-version-check --progress-bar off -r "$project/ci/requirements-test.txt"
    if [ "$last_code" != 0 ]; then no_upstream="upstream-packages failed"; fi
  fi
  if [ -z "$no_upstream" ]; then
    case_of upstream-configs 60 "$python" "$project/ci/offline_hub.py" "$out/hub"
    if [ "$last_code" != 0 ]; then no_upstream="upstream-configs failed"; fi
  fi
  if [ -n "$stopped" ]; then no_upstream="this run was interrupted"; fi
fi
upstream=(env HF_HOME="$out/hub" HF_HUB_OFFLINE=1 "PYTHONPATH=$project/ci${PYTHONPATH:+:$PYTHONPATH}"
  "$python" -m pytest -q -W ignore -p no:cacheprovider)
for part in upstream upstream-quick; do
  if ! wanted "$part"; then continue; fi
  if [ -n "$no_upstream" ]; then
    skip_case "$part" "$no_upstream"
    continue
  fi
  cd "$(tests_root)"
  if [ "$part" = upstream ]; then
    spread_tests
    case_of upstream 4200 "${upstream[@]}" --junitxml="$out/upstream-tests.xml" \
      "${spread[@]}" \
      tests/v1/attention/test_mla_backends.py \
      tests/v1/attention/test_flashinfer_mla_sparse_sm90.py \
      tests/kernels/attention/test_attention_selector.py \
      tests/test_attention_backend_registry.py
  else
    # Decode, verify, mixed and prefill batches once, at two pairs of scales.
    case_of upstream-quick 300 "${upstream[@]}" --junitxml="$out/upstream-quick-tests.xml" \
      -p one_mla_backend --mla-backend KIMI_K3_KV_BALANCED_MLA --durations=5 \
      -k "KIMI_K3 or adaptive_varlen or deepseek-MLAPrefillBackendEnum.FLASH_ATTN-1.0-1.0-fp8-1- or deepseek-MLAPrefillBackendEnum.FLASH_ATTN-2.0-3.0-fp8-8-" \
      tests/v1/attention/test_mla_backends.py \
      tests/kernels/attention/test_attention_selector.py
  fi
  cd "$project"
done
if wanted engine; then
  runs=ref-bf16,fp8-triton,ours-eager,ours-graph,ours-sync-check,ours-piecewise,ours-dspark
  runs+=,ours-dspark-graph,ours-dspark-bf16-draft,ours-dspark-by-batch,ours-k3
  runs+=,ours-dspark-adaptive,ours-ngram-graph,ours-mixed,ours-dspark-groups
  case_of engine 960 "$python" "$project/scripts/engine_check.py" --only "$runs" \
    --gpus "$two" --parallel $((hoppers > 1 ? 4 : 6)) --timeout 420 --budget 480 \
    --out "$out/engine"
fi
if wanted serve; then
  case_of serve 600 "$python" "$project/scripts/serve_check.py" --out "$out/serve"
fi
if wanted main-job; then
  case_of main-job 300 "$python" "$project/scripts/demo.py" --lengths 524288,2048x63
fi
benchmarks="$project/vllm_overlay/benchmarks/kernels"
if wanted bench; then
  case_of bench 600 "$python" "$benchmarks/benchmark_kimi_k3_kv_balanced_mla.py" \
    --ratios "$out/ratios.json" --json "$out/bench.json" --png "$out/bench.png"
  if [ -e "$out/ratios.json" ]; then
    case_of bench-ratios 60 "$python" "$project/ci/check_ratios.py" "$out/ratios.json" \
      "$project/ci/baseline/gpu_ratios.json" --tolerance 0.12
  else
    skip_case bench-ratios "the benchmark wrote no ratios"
  fi
  case_of accuracy 120 "$python" "$benchmarks/benchmark_kimi_k3_kv_balanced_mla.py" --accuracy
fi
if wanted promises; then
  case_of promises 900 "$python" "$project/scripts/promises.py" --out "$out/promises"
fi
if wanted sparse; then
  with_stock=()
  if [ -e "$stock" ]; then with_stock=(--stock "$stock"); fi
  mkdir -p "$out/sparse"
  case_of sparse-checks 600 "$python" \
    "$project/vllm_overlay/tests/v1/attention/test_flashinfer_mla_sparse_sm90_gpu.py" \
    "$out/sparse" "${with_stock[@]}"
  for cache in fp8 bf16; do
    case_of "sparse-bench-$cache" 420 "$python" \
      "$benchmarks/benchmark_flashinfer_mla_sparse_sm90.py" --cache "$cache" \
      --json "$out/sparse/bench-$cache.jsonl"
  done
  if [ -e "$stock" ]; then
    case_of sparse-engine 660 "$python" "$project/scripts/sparse_check.py" \
      --out "$out/sparse-engine" --stock "$stock" --gpus "$first" --parallel 10 \
      --budget 600 --tolerance 0.1
  else
    skip_case sparse-engine "vLLM's own sparse file is not kept at $stock"
  fi
fi
if wanted timing; then
  case_of timing 960 "$python" "$project/scripts/engine_timing.py" --out "$out/timing" \
    --gpus "$two" --timeout 300 --budget 600
fi
if wanted two-gpus; then
  if [ "$hoppers" -ge 2 ]; then
    case_of two-gpus 600 "$python" "$project/scripts/two_gpu_check.py" --out "$out/two-gpus" \
      --gpus "$two"
  else
    skip_case two-gpus "it needs two Hopper GPUs and there is $hoppers"
  fi
fi

step "summary"
code=0
"$python" "$project/ci/summary.py" "$out" --title "$(tail -n 1 "$out/gpu.csv")" \
  >"$out/summary.md" || code=$?
cat "$out/summary.md"
if [ -n "${GITHUB_STEP_SUMMARY:-}" ]; then cat "$out/summary.md" >>"$GITHUB_STEP_SUMMARY"; fi
if [ ${#lost[@]} -gt 0 ]; then
  printf 'error: %s ended without a result\n' "${lost[@]}" >&2
  code=1
fi
if [ -n "$stopped" ]; then code=130; fi
exit "$code"
