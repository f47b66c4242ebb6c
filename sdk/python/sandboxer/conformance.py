"""Holds an extension to the contract: python3 -m sandboxer.conformance ext.yaml [--run PATTERN].

It runs `sandboxer extension test FILE [--run PATTERN] -o json`, the suite in the program, and
prints a table. The program is $SANDBOXER_PROGRAM, or sandboxer in the PATH. The program's
lines are those of Go's test2json: objects with Action, Test, Elapsed and Output.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from typing import Iterable

ENDS = {"pass": "ok", "fail": "FAIL", "skip": "skipped"}


def program() -> str:
    """The path of the program; SystemExit if there is none."""
    named = os.environ.get("SANDBOXER_PROGRAM")
    found = shutil.which(named or "sandboxer")
    if found is None:
        where = f"SANDBOXER_PROGRAM names {named}, which cannot be run" if named else "there is no sandboxer in the PATH"
        raise SystemExit(f"{where}; set SANDBOXER_PROGRAM to the program")
    return found


def table(lines: Iterable[str]) -> tuple[list[str], int]:
    """Reads the program's lines; returns those of the table, and how many tests failed."""
    output: dict[str, list[str]] = {}
    ended: list[tuple[str, str, float]] = []
    rest = []
    for line in lines:
        try:
            event = json.loads(line)
            action, test = event["Action"], event.get("Test", "")
        except (ValueError, KeyError, TypeError):
            rest.append(line.rstrip("\n"))
            continue
        if action == "output" and test:
            output.setdefault(test, []).append(event.get("Output", "").rstrip("\n"))
        elif action in ENDS and test:
            ended.append((test, action, event.get("Elapsed", 0.0)))
    parents = {t.rpartition("/")[0] for t, _, _ in ended}
    leaves = [e for e in ended if e[0] not in parents or e[1] == "fail" and not any(
        t.startswith(e[0] + "/") and a == "fail" for t, a, _ in ended)]
    width = max((len(t) for t, _, _ in leaves), default=0)
    out = rest
    for test, action, seconds in leaves:
        out.append(f"{test:<{width}}  {ENDS[action]:<7}  {seconds:6.2f}s")
        if action == "fail":
            out += [f"    {o.strip()}" for o in output.get(test, []) if not o.lstrip().startswith(("---", "==="))]
    count = {a: sum(e[1] == a for e in leaves) for a in ENDS}
    out.append(f"{count['pass']} passed, {count['fail']} failed, {count['skip']} skipped")
    return out, count["fail"]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python3 -m sandboxer.conformance", description=__doc__.splitlines()[0])
    parser.add_argument("file", help="the extension's file, ext.<name>.yaml")
    parser.add_argument("--run", metavar="PATTERN", help="only tests that match, as group/behaviour")
    args = parser.parse_args(argv)
    command = [program(), "extension", "test", args.file, "-o", "json"]
    if args.run:
        command += ["--run", args.run]
    p = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, encoding="utf-8", errors="replace")
    lines, failed = table(p.stdout.splitlines())
    print("\n".join(lines))
    return p.returncode or (1 if failed else 0)


if __name__ == "__main__":
    sys.exit(main())
