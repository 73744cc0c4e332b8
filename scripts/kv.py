#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Entry point of the scripts: `python scripts/kv.py COMMAND ...`."""

import importlib
import os
import sys

COMMANDS = {
    "apply": "kvpatch.cli_apply",
    "fetch": "kvpatch.fetch",
    "verify": "kvpatch.verify",
    "drift": "kvpatch.drift",
    "export": "kvpatch.export",
    "make-pr": "kvpatch.make_pr",
    "load": "kvpatch.load",
    "hooks": "kvpatch.hooks",
    "baseline": "kvpatch.baseline",
}


def main() -> int:
    """Run one command; print its error, if any, without a traceback."""
    if sys.version_info < (3, 11):  # noqa: UP036 - says so instead of failing later
        print(
            f"this needs Python 3.11 or newer\n  got:     {sys.version.split()[0]} "
            f"({sys.executable})\n  to do:   set PYTHON to a newer one",
            file=sys.stderr,
        )
        return 2
    usage = f"usage: scripts/kv.py {{{','.join(COMMANDS)}}} ...; --help after a command"
    if sys.argv[1:2] in (["-h"], ["--help"]):
        print(usage)
        return 0
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        print(usage, file=sys.stderr)
        return 2
    from kvpatch.errors import PatchSetError

    try:
        status = importlib.import_module(COMMANDS[sys.argv[1]]).main(sys.argv[2:])
        sys.stdout.flush()
        return status
    except PatchSetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; nothing was left half done", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Who read the output (`| head`) is gone; Python would complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


if __name__ == "__main__":
    sys.exit(main())
