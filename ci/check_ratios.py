# SPDX-License-Identifier: Apache-2.0
"""Hold a benchmark's ratios to recorded ones.

    python ci/check_ratios.py RESULT.json RECORD.json [--tolerance 0.12] [--write]

Both files map a case's name to our time over the other kernel's, measured in one
process on one card. A ratio cancels most of what differs between two cards and two
days; microseconds don't. A case that got slower than the record by more than the
tolerance fails, and so does one that is missing. --write makes the result the record.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def compare(
    result: dict[str, float], record: dict[str, float], tolerance: float
) -> list[tuple[str, float | None, float, bool]]:
    """Return (case, ratio, recorded ratio, good) for each recorded case."""
    rows = []
    for case, old in sorted(record.items()):
        new = result.get(case)
        rows.append((case, new, old, new is not None and new <= old * (1 + tolerance)))
    return rows


def main() -> int:
    """Print the comparison; return 1 when a case is slower or missing."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("result", type=Path, help="what a benchmark wrote")
    made.add_argument("record", type=Path, help="what it is held to")
    made.add_argument(
        "--tolerance", type=float, default=0.12, help="share that is still no fault"
    )
    made.add_argument("--write", action="store_true", help="make it the record")
    args = made.parse_args()
    result = json.loads(args.result.read_text())
    if args.write:
        args.record.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")
        print(f"recorded {len(result)} cases")
        return 0
    record = json.loads(args.record.read_text())
    rows = compare(result, record, args.tolerance)
    print("| case | ratio | recorded | |\n|---|---|---|---|")
    for case, new, old, good in rows:
        shown = "missing" if new is None else f"{new:.3f}"
        print(f"| {case} | {shown} | {old:.3f} | {'' if good else 'SLOWER'} |")
    for case in sorted(set(result) - set(record)):
        print(f"| {case} | {result[case]:.3f} | new | |")
    return 0 if rows and all(good for *_, good in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
