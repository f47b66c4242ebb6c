"""python3 -m sandboxer.conformance ext.yaml [--run PATTERN]: whether an extension keeps the contract.

The program does the work (sandboxer extension test); this prints a table of what it found. The
program is that of SANDBOXER_PROGRAM, or sandboxer of the PATH. Exit status: 0, 1 when a test failed,
2 when none could be run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from typing import Optional, Sequence


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="python3 -m sandboxer.conformance", description="Run the conformance suite against an extension.")
    parser.add_argument("file", help="the extension's file")
    parser.add_argument("--run", default="", metavar="PATTERN", help="only tests whose group/behaviour PATTERN matches")
    parser.add_argument("--input", action="append", default=[], metavar="KEY=VALUE", help="give sandboxes this input")
    parser.add_argument("--image", default="", help="make sandboxes of this image")
    parser.add_argument("--profile", default="", help="make sandboxes as this profile says")
    args = parser.parse_args(argv)
    program = os.environ.get("SANDBOXER_PROGRAM") or shutil.which("sandboxer")
    if not program:
        print("the program sandboxer is not in the PATH; SANDBOXER_PROGRAM can name it", file=sys.stderr)
        return 2
    command = [program, "extension", "test", args.file, "-o", "json"]
    for name in ("run", "image", "profile"):
        if getattr(args, name):
            command += [f"--{name}", getattr(args, name)]
    for value in args.input:
        command += ["--input", value]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    except OSError as e:
        print(f"{program} cannot be run: {e.strerror}", file=sys.stderr)
        return 2
    try:
        results = json.loads(done.stdout)["items"]
    except (ValueError, KeyError, TypeError):
        return done.returncode or 2  # it has said why
    width = max((len(r["test"]) for r in results), default=4)
    for r in results:
        why = " ".join(r.get("output", "").split())
        print(f"{r['test']:{width}}  {r['result']:4}  {r['seconds']:7.2f}s  {why}".rstrip())
    count = {kind: sum(r["result"] == kind for r in results) for kind in ("pass", "fail", "skip")}
    print(f"{count['pass']} passed, {count['fail']} failed, {count['skip']} skipped")
    return 1 if count["fail"] or done.returncode else 0


if __name__ == "__main__":
    sys.exit(main())
