#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Check the patch set against the pinned release. Options: --help.
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
exec "${PYTHON:-python3}" "$here/kv.py" verify "$@"
