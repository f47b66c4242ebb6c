"""What the host remembers of sandboxes, for classes that know nothing of repeats and crashes.

One file for each sandbox in the extension's private directory, written before the class is asked
to make it and again with its handle. Files are whole or not there. A lock of each keeps other hosts
on the same directory out.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import uuid
from contextlib import contextmanager
from typing import Any, Iterator, Optional


def of_sandbox(id: str) -> str:
    """Return the key of a sandbox. IDs are callers' choice: no two kinds of record share a name."""
    return f"sandbox.{id}"


def of_snapshot(id: str) -> str:
    """Return the key of a snapshot."""
    return f"snapshot.{id}"


class Journal:
    """The records in one directory."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        os.makedirs(directory, mode=0o700, exist_ok=True)
        # Which journal it is: a handle of this one without a record is that of something that was torn down.
        with self.locked("journal.id") as record:
            value = record.read()
            if value is None:
                value = {"journal": uuid.uuid4().hex[:16]}
                record.write(value)
        self.id: str = value["journal"]

    def _path(self, key: str) -> str:
        # A kind and a name, "sandbox.one": IDs are short, plain and without a dot; what is not must not lead elsewhere.
        kind, _, name = key.partition(".")
        if not name.replace("-", "").replace("_", "").isalnum() or len(name) > 100:
            name = hashlib.sha256(name.encode()).hexdigest()
        return os.path.join(self._directory, f"{kind}.{name}")

    @contextmanager
    def locked(self, key: str) -> Iterator["Record"]:
        """Keep everybody else from the record of key: of_sandbox(id) or of_snapshot(id)."""
        path = self._path(key) + ".lock"
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX)
            try:
                if os.stat(path).st_ino == os.fstat(fd).st_ino:
                    break
            except FileNotFoundError:
                pass
            os.close(fd)  # whoever had it has removed it
        record = Record(self._path(key) + ".json")
        try:
            yield record
        finally:
            if not record.exists():
                for left in (record.path + ".new", path):
                    try:
                        os.unlink(left)
                    except OSError:
                        pass
            os.close(fd)

    def peek(self, key: str) -> Optional[dict]:
        """Return the record of key as it is now, without waiting for whoever has it; None if there is none."""
        return Record(self._path(key) + ".json").read()

    def all(self) -> Iterator[dict]:
        """Return every record, in no order."""
        for name in sorted(os.listdir(self._directory)):
            if name.endswith(".json"):
                value = Record(os.path.join(self._directory, name)).read()
                if value is not None:
                    yield value


class Record:
    """One record, while it is locked."""

    def __init__(self, path: str) -> None:
        self.path = path

    def exists(self) -> bool:
        return os.path.exists(self.path)

    def read(self) -> Optional[dict]:
        """Return it; None if there is none, or it cannot be read."""
        try:
            with open(self.path, "rb") as f:
                value = json.load(f)
        except (FileNotFoundError, ValueError):
            return None
        return value if isinstance(value, dict) else None

    def write(self, value: dict[str, Any]) -> None:
        """Replace it; it is on the disk when write returns."""
        new = self.path + ".new"  # nobody else writes it: the record is locked
        with open(new, "w") as f:
            json.dump(value, f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(new, self.path)
        self._sync(os.path.dirname(self.path))

    def remove(self) -> None:
        try:
            os.unlink(self.path)
        except FileNotFoundError:
            return
        self._sync(os.path.dirname(self.path))

    @staticmethod
    def _sync(directory: str) -> None:
        fd = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
