"""python3 -m sandboxer.conformance ext.yaml [--run PATTERN]: whether an extension keeps the contract.

The program does the work (sandboxer extension test); this prints each result as it comes. The
program is that of SANDBOXER_PROGRAM, or sandboxer of the PATH. Exit status: 0, 1 when a test failed,
2 when none could be run, 130 after an interrupt.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
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
    command = [program, "extension", "test", args.file, "-o", "jsonl"]
    for name in ("run", "image", "profile"):
        if getattr(args, name):
            command += [f"--{name}", getattr(args, name)]
    for value in args.input:
        command += ["--input", value]
    try:  # an interrupt at the terminal reaches it by this process alone
        process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    except OSError as e:
        print(f"{program} cannot be run: {e.strerror}", file=sys.stderr)
        return 2
    before = None
    if threading.current_thread() is threading.main_thread():
        before = signal.signal(signal.SIGINT, lambda *_: process.send_signal(signal.SIGINT))
    count = {"pass": 0, "fail": 0, "skip": 0}
    try:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                r = json.loads(line)
                why = " ".join(r.get("output", "").split())
                print(f"{r['test']:56}  {r['result']:4}  {r['seconds']:7.2f}s  {why}".rstrip(), flush=True)
                count[r["result"]] += 1
    finally:
        code = process.wait()
        if before is not None:
            signal.signal(signal.SIGINT, before)
    if not any(count.values()):
        return code or 2  # it has said why
    print(f"{count['pass']} passed, {count['fail']} failed, {count['skip']} skipped")
    return code or (1 if count["fail"] else 0)


if __name__ == "__main__":
    sys.exit(main())
