#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Refuse a commit that changes patches/*.patch and vllm_overlay/ together: a patch is a
# hook that stays when the code behind it changes, and each is reviewed for itself.
# Usage: ci/check_commit.sh [COMMIT]; without COMMIT, what is staged.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
case ${1:-} in
  -h | --help) sed -n '3,5s/^# //p' "ci/check_commit.sh"; exit 0 ;;
  "") names=$(git diff --cached --name-only) what="the staged change" ;;
  *) names=$(git show --format= --name-only "$1") what="commit $1" ;;
esac
patches=$(grep '^patches/.*\.patch$' <<<"$names" || true)
overlay=$(grep '^vllm_overlay/' <<<"$names" || true)
if [ -n "$patches" ] && [ -n "$overlay" ]; then
  {
    echo "error: $what mixes patches and overlay"
    echo "  got:     $(tr '\n' ' ' <<<"$patches")"
    echo "           $(tr '\n' ' ' <<<"$overlay")"
    echo "  allowed: one of both in a commit"
    echo "  to do:   commit the overlay first, then the patch that hooks it up"
  } >&2
  exit 1
fi
