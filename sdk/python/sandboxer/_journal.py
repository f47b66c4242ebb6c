"""What is known of sandboxes whose class remembers nothing: one file for each ID."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import threading
from typing import Any, Iterator

_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}\Z")

# How many of those that ended are remembered, so that what comes late is known as such.
_ENDED = 1000


class Journal:
    """A directory of records. Who writes one holds its lock, also against other processes."""

    def __init__(self, dir: str) -> None:
        self._dir = dir
        os.makedirs(dir, mode=0o700, exist_ok=True)
        # Never closed: closing any descriptor of the file would give up all locks.
        self._locks = os.open(os.path.join(dir, "locks"), os.O_RDWR | os.O_CREAT, 0o600)
        self._mutexes: dict[str, list] = {}
        self._mutex = threading.Lock()
        for name in os.listdir(dir):
            if name.endswith(".new"):  # of a write that was cut short, or of another process's
                with contextlib.suppress(ValueError, OSError):
                    os.kill(int(name.split(".")[-2]), 0)
                    continue
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(dir, name))
        self._writes = 0

    def _name(self, id: str) -> str:
        return id if _PLAIN.match(id) else "=" + hashlib.sha256(id.encode("utf-8", "replace")).hexdigest()

    @contextlib.contextmanager
    def locked(self, id: str) -> Iterator[None]:
        with self._mutex:
            held = self._mutexes.setdefault(id, [threading.Lock(), 0])
            held[1] += 1
        at = int.from_bytes(hashlib.sha256(id.encode("utf-8", "replace")).digest()[:7], "big")
        try:
            with held[0]:
                fcntl.lockf(self._locks, fcntl.LOCK_EX, 1, at)
                try:
                    yield
                finally:
                    fcntl.lockf(self._locks, fcntl.LOCK_UN, 1, at)
        finally:
            with self._mutex:
                held[1] -= 1
                if not held[1]:
                    del self._mutexes[id]

    def get(self, id: str) -> dict[str, Any] | None:
        try:
            with open(os.path.join(self._dir, self._name(id) + ".json"), encoding="utf-8") as f:
                return json.load(f)
        except FileNotFoundError:
            return None

    def put(self, id: str, record: dict[str, Any]) -> None:
        """Writes a record; it is on the disk when this returns."""
        path = os.path.join(self._dir, self._name(id) + ".json")
        new = f"{path}.{os.getpid()}.new"
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(fd, "w", encoding="utf-8") as f:
            json.dump({"version": 1, "id": id, **record}, f)
            f.flush()
            os.fsync(fd)
        os.replace(new, path)
        dir = os.open(self._dir, os.O_RDONLY)
        try:
            os.fsync(dir)
        finally:
            os.close(dir)

    def end(self, id: str, record: dict[str, Any]) -> None:
        """Removes a record, but for a mark that it ended, which is kept for a while."""
        self.put(id, {**record, "state": "ended"})
        self._writes += 1
        if self._writes % 100 == 1:
            self._prune()

    def _prune(self) -> None:
        ended = []
        for r, path in self._all():
            if r.get("state") == "ended":
                with contextlib.suppress(OSError):
                    ended.append((os.stat(path).st_mtime, r["id"], path))
        for _, id, path in sorted(ended)[: -_ENDED or None]:
            with contextlib.suppress(OSError):
                os.unlink(path)

    def _all(self) -> Iterator[tuple[dict[str, Any], str]]:
        for name in sorted(os.listdir(self._dir)):
            path = os.path.join(self._dir, name)
            if name.endswith(".json"):
                with contextlib.suppress(OSError, ValueError):
                    with open(path, encoding="utf-8") as f:
                        yield json.load(f), path

    def records(self) -> Iterator[dict[str, Any]]:
        """Those that have not ended."""
        for r, _ in self._all():
            if r.get("state") != "ended":
                yield r
