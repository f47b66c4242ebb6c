"""What extensions are given and what they return besides dicts of strings."""

from __future__ import annotations

import contextvars
import stat
import threading
import time
from datetime import datetime, timezone
from typing import Any, Callable, Iterator, Mapping, Optional


class Record(Mapping[str, Any]):
    """An object of the broker's JSON: record.name and record["name"] are the same.

    A name that the broker knows and left out is None, and so is not in the mapping; one
    that nobody knows raises AttributeError.
    """

    _names: frozenset = frozenset()

    def __init__(self, fields: Optional[Mapping[str, Any]] = None, **more: Any) -> None:
        self._fields = {k: _wrap(v) for k, v in {**(fields or {}), **more}.items()}

    def __getitem__(self, name: str) -> Any:
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self._fields[name]
        except KeyError:
            if name in self._names:
                return None
            raise AttributeError(f"{type(self).__name__} has no {name!r}") from None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._fields!r})"


def _wrap(v: Any) -> Any:
    if isinstance(v, Mapping) and not isinstance(v, (Record, dict)):
        return dict(v)
    return v


class Profile(Record):
    """The profile that a sandbox is made by, with the names of its JSON."""

    _names = frozenset(
        "id title description extension isolation requires image command env labels limits max_limits"
        " network mounts ports workspace user inputs ttl_ns max_ttl_ns idle_ns on_ttl pause_depth"
        " max_paused_ns auto_resume price pool builtin".split()
    )


class MeterQuote(Record):
    """A price before anything exists.

    amount is for the whole duration that was asked about, in USD (float, int, Decimal or a
    decimal string); setup is the part of it that does not depend on time; per_hour is the
    rest, by the hour, and follows from both where it is left out; detail is for people.
    """

    _names = frozenset("amount setup per_hour duration_ns detail".split())

    def __init__(self, amount: Any = None, **fields: Any) -> None:
        if isinstance(amount, Mapping):
            super().__init__(amount, **fields)
        elif amount is None:
            super().__init__(fields)
        else:
            super().__init__(fields, amount=amount)


class Exit:
    """How a command ended. Killed by signal n, code is 128+n and signal its name without SIG."""

    def __init__(self, code: int, signal: str = "", oom_killed: bool = False) -> None:
        self.code = code
        self.signal = signal
        self.oom_killed = oom_killed

    def __repr__(self) -> str:
        return f"Exit({self.code!r}, {self.signal!r}, oom_killed={self.oom_killed!r})"


class FileInfo:
    """One file inside a sandbox; symbolic links are described, not followed.

    path is absolute; mode has type and permissions as in os.stat; mod_time is a datetime or
    seconds since 1970. Names that are not UTF-8 are strings as os.fsdecode makes them.
    """

    def __init__(
        self,
        path: str,
        *,
        mode: int,
        size: int = 0,
        mod_time: Any = 0,
        owner: str = "",
        group: str = "",
        target: str = "",
    ) -> None:
        self.path = path
        self.mode = mode
        self.size = size
        self.mod_time = mod_time
        self.owner = owner
        self.group = group
        self.target = target


class Found:
    """A sandbox that the backend knows by itself: its handle, its generation, and if the
    backend keeps them the stamp (Request.stamp) and the deadline."""

    def __init__(
        self,
        handle: Mapping[str, str],
        *,
        generation: int = 0,
        stamp: Optional[bytes] = None,
        fuse: Optional[datetime] = None,
    ) -> None:
        self.handle = handle
        self.generation = generation
        self.stamp = stamp
        self.fuse = fuse


class Request:
    """What there is to know of a call besides its arguments.

    sandbox_id and generation say which sandbox; owner is the installation, which outside
    objects carry; env is the environment of the sandbox, which may hold secrets; spec is
    the whole order, and stamp what discover should return again, of calls that make a
    sandbox; snapshot_id is the broker's name for the snapshot that is made.
    """

    def __init__(
        self,
        *,
        sandbox_id: str = "",
        generation: int = 0,
        owner: str = "",
        host: str = "",
        env: Optional[Mapping[str, str]] = None,
        spec: Optional[Mapping[str, Any]] = None,
        stamp: bytes = b"",
        snapshot_id: str = "",
        deadline: Optional[float] = None,
        progress: Optional[Callable[[str, int, int], None]] = None,
    ) -> None:
        self.sandbox_id = sandbox_id
        self.generation = generation
        self.owner = owner
        self.host = host
        self.env = dict(env or {})
        self.spec = Record(spec or {})
        self.stamp = stamp
        self.snapshot_id = snapshot_id
        self.cancelled = threading.Event()
        self._deadline = deadline
        self._progress = progress

    def remaining(self) -> Optional[float]:
        """How many seconds the caller still waits; None if there is no limit."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def progress(self, step: str, done: int = 0, total: int = 0) -> None:
        """Tells the broker how far the call has come."""
        if self._progress is not None:
            self._progress(step, done, total)


_current: "contextvars.ContextVar[Request]" = contextvars.ContextVar("sandboxer_request")


def request() -> Request:
    """The request of the call that this thread serves; an empty one outside of any."""
    try:
        return _current.get()
    except LookupError:
        return Request()


# Go's bits of a file's mode, by the type that os.stat has.
_TYPES = {
    stat.S_IFREG: 0,
    stat.S_IFDIR: 1 << 31,
    stat.S_IFLNK: 1 << 27,
    stat.S_IFBLK: 1 << 26,
    stat.S_IFCHR: 1 << 26 | 1 << 21,
    stat.S_IFIFO: 1 << 25,
    stat.S_IFSOCK: 1 << 24,
}
_BITS = {stat.S_ISUID: 1 << 23, stat.S_ISGID: 1 << 22, stat.S_ISVTX: 1 << 20}


def mode_out(mode: int) -> int:
    """Turns a mode of os.stat into one of the protocol."""
    out = mode & 0o777 | _TYPES.get(stat.S_IFMT(mode), 0)
    for ours, theirs in _BITS.items():
        if mode & ours:
            out |= theirs
    return out


def mode_in(mode: int) -> int:
    """Turns the permissions of a mode of the protocol into those of os.chmod."""
    out = mode & 0o777
    for ours, theirs in _BITS.items():
        if mode & theirs:
            out |= ours
    return out


def time_out(t: Any) -> str:
    """Writes a datetime, or seconds since 1970, as RFC 3339. A datetime without a zone is UTC."""
    if not isinstance(t, datetime):
        t = datetime.fromtimestamp(t, timezone.utc)
    elif t.tzinfo is None:
        t = t.replace(tzinfo=timezone.utc)
    return t.astimezone(timezone.utc).isoformat(timespec="microseconds").replace("+00:00", "Z")


def time_in(s: str) -> datetime:
    """Reads RFC 3339, to the microsecond."""
    head, zone = (s[:-1], "+00:00") if s[-1:] in "Zz" else (s[:-6], s[-6:])
    whole, _, frac = head.partition(".")
    return datetime.fromisoformat(f"{whole}.{(frac + '000000')[:6]}{zone}")
