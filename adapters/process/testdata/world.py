"""Sandboxes that are directories and processes of this machine: what is there without the extension.

python3 world.py keep DIRECTORY has the sandbox removed when its time is over, remove DIRECTORY now.
"""

import contextlib
import hashlib
import json
import os
import shutil
import signal
import sys
import time


def tag(where):
    """Return what every process of a sandbox has, whatever it becomes: a limit on locks, which Linux does not heed."""
    return 1 << 61 | int.from_bytes(hashlib.sha256(os.fsencode(where)).digest()[:7], "big")


def inside(where, argv):
    """Return the command line that runs argv as a process of the sandbox, if that is still there once it is one."""
    limit = f"{tag(where)}:{tag(where)}"
    return ["prlimit", f"--locks={limit}", "sh", "-c", 'test -d "$0" || exit 143; exec "$@"', where, *argv]


def members(where):
    """Return the IDs of the sandbox's processes."""
    want, found = str(tag(where)).encode(), []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):  # it has ended
                with open(f"/proc/{name}/limits", "rb") as f:
                    if want in f.read() and status(name)["State"] not in "ZX":
                        found.append(int(name))
    return found


def status(pid):
    """Return what there is to know of a process: one letter as State, kB as VmRSS."""
    with open(f"/proc/{pid}/status", "rb") as f:
        fields = dict(line.partition(":")[::2] for line in f.read().decode(errors="replace").splitlines())
    return {k: v.split()[0] for k, v in fields.items() if v.split()}


def each(where, number):
    """Send a signal to all of them until there are no new ones."""
    sent = set()
    while True:
        new = [pid for pid in members(where) if pid not in sent or number == signal.SIGKILL]
        if not new:
            return
        for pid in new:
            sent.add(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        time.sleep(0.002)


def remove(where):
    """Remove what there is of a sandbox, also what an earlier removal has left. Return whether there was something."""
    gone = where + ".gone"
    there = os.path.isdir(where)
    if there:
        shutil.rmtree(gone, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            os.rename(where, gone)
    each(where, signal.SIGKILL)
    shutil.rmtree(gone, ignore_errors=True)
    return there


def read(where):
    """Return what the sandbox is. FileNotFoundError: it is not there."""
    with open(os.path.join(where, "sandbox.json")) as f:
        return json.load(f)


def write(where, value):
    path = os.path.join(where, "sandbox.json")
    with open(os.open(path + ".new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as f:
        json.dump(value, f)
    os.rename(path + ".new", path)


def keep(where):
    """Remove the sandbox when its time is over. Returns at once; a process of its own waits."""
    if os.fork() > 0:
        return
    while True:
        try:
            until = read(where)["until"]
        except FileNotFoundError:
            return
        left = until - time.time()
        if left <= 0:
            remove(where)
            return
        time.sleep(min(left, 0.2))


if __name__ == "__main__":
    {"keep": keep, "remove": remove}[sys.argv[1]](sys.argv[2])
