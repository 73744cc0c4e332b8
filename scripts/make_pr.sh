#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Prepare the upstream pull requests in a folder. Options: --help. The hooks' tools come
# from .venv-lint, which ci/lint.sh makes.
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
python="${KVPATCH_LINT_ENV:-$here/../.venv-lint}/bin/python"
if [ ! -x "$python" ]; then python=${PYTHON:-python3}; fi
exec "$python" "$here/kv.py" make-pr "$@"
