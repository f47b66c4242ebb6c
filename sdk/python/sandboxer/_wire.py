"""The bytes of the extension protocol: lines of JSON, and frames of streams."""

from __future__ import annotations

import base64
import io
import json
import math
import os
import socket
import struct
import threading
from typing import Any

from sandboxer import errors

MAX_LINE = 1 << 20
MAX_FRAME = 1 << 20
_CHUNK = 256 << 10

DATA_IN, DATA_OUT, DATA_ERR, RESIZE, SIGNAL, RESULT, ERROR, END = range(8)


class ProtocolError(Exception):
    """The other side does not keep to the protocol."""


def _unique(pairs: list) -> dict:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a name is given twice")
    return out


def _finite(s: str) -> float:
    f = float(s)
    if not math.isfinite(f):
        raise ValueError(f"{s} is no number")
    return f


def _refuse(s: str) -> None:
    raise ValueError(f"{s} is no JSON")


def parse(line: bytes) -> Any:
    """Reads one value, strictly."""
    try:
        return json.loads(
            line.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_float=_finite,
            parse_constant=_refuse,
        )
    except (ValueError, RecursionError) as e:
        raise ProtocolError(f"no valid JSON: {e}") from None


def dump(v: Any) -> bytes:
    """Writes one value; ValueError or TypeError for what JSON has not."""
    return json.dumps(v, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8")


def text_out(s: str) -> Any:
    """Writes bytes that os.fsdecode made a string of."""
    try:
        s.encode("utf-8")
        return s
    except UnicodeEncodeError:
        raw = s.encode("utf-8", "surrogateescape")
        return {"base64": base64.b64encode(raw).decode("ascii")}


def text_in(v: Any) -> str:
    """Reads what text_out writes."""
    if isinstance(v, str):
        return v
    if isinstance(v, dict) and isinstance(v.get("base64"), str):
        try:
            return base64.b64decode(v["base64"], validate=True).decode("utf-8", "surrogateescape")
        except ValueError:
            pass
    raise errors.Invalid("want a string or base64")


class Lines:
    """The lines of a control connection."""

    def __init__(self, fd_in: int, fd_out: int) -> None:
        self._in, self._out = fd_in, fd_out
        self._rest = bytearray()
        self._lock = threading.Lock()

    def read(self) -> Any:
        """Returns the next object; None at the end."""
        start = 0
        while True:
            end = self._rest.find(b"\n", start)
            if end >= 0:
                if end >= MAX_LINE:
                    raise ProtocolError("a line of more than 1 MiB")
                line = bytes(self._rest[:end])
                del self._rest[: end + 1]
                v = parse(line)
                if not isinstance(v, dict):
                    raise ProtocolError("a line that is no object")
                return v
            start = len(self._rest)
            if start >= MAX_LINE:
                raise ProtocolError("a line of more than 1 MiB")
            data = os.read(self._in, 64 << 10)
            if not data:
                return None
            self._rest += data

    def write(self, v: Any) -> None:
        """Writes one object; ValueError for one that cannot be."""
        data = dump(v) + b"\n"
        if len(data) > MAX_LINE:
            raise ValueError("more than 1 MiB")
        view = memoryview(data)
        with self._lock:
            while view:
                view = view[os.write(self._out, view):]


def error_out(e: errors.SandboxError) -> dict:
    out = {"kind": e.kind, "message": clean(e.message or e.kind)}
    if e.hint:
        out["hint"] = clean(e.hint)
    if e.retry_after:
        out["retry_after_ms"] = int(e.retry_after * 1000)
    if e.public:
        out["public"] = clean(e.public)
    if e.untouched:
        out["untouched"] = True
    return out


def error_in(v: Any) -> errors.SandboxError:
    v = v if isinstance(v, dict) else {}
    return errors.KINDS.get(v.get("kind"), errors.Internal)(str(v.get("message", "")), hint=str(v.get("hint", "")))


def clean(s: Any, limit: int = 4096) -> str:
    """A message that is text, in one line, and not too long."""
    s = str(s).encode("utf-8", "replace").decode("utf-8")
    return " ".join(s.split())[:limit]


class Stream:
    """A connection of its own for the bytes of one call."""

    def __init__(self, path: str, token: str) -> None:
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._lock = threading.Lock()
        self._ended = False
        try:
            self._sock.settimeout(10)
            self._sock.connect(path)
            self._sock.sendall(token.encode("ascii") + b"\n")
            self._sock.settimeout(None)
        except (OSError, ValueError) as e:
            self._sock.close()
            raise errors.Unavailable(f"the socket for streams cannot be reached: {clean(e)}") from None

    def send(self, channel: int, data: Any = b"") -> None:
        view = memoryview(data).cast("B")
        with self._lock:
            if self._ended:
                raise BrokenPipeError("the stream has ended")
            while True:
                part, view = view[:_CHUNK], view[_CHUNK:]
                self._sock.sendall(struct.pack(">BI", channel, len(part)) + part)
                if not view:
                    break
            if channel in (ERROR, END):
                self._ended = True

    def recv(self) -> tuple[int, bytes] | None:
        """Returns the next frame; None where the connection ends between frames."""
        head = self._exactly(5, True)
        if head is None:
            return None
        channel, n = struct.unpack(">BI", head)
        if n > MAX_FRAME:
            raise ProtocolError("a frame of more than 1 MiB")
        return channel, self._exactly(n, False) or b""

    def _exactly(self, n: int, may_end: bool) -> bytes | None:
        out = bytearray()
        while len(out) < n:
            data = self._sock.recv(min(n - len(out), _CHUNK))
            if not data:
                if may_end and not out:
                    return None
                raise ProtocolError("a stream broke off")
            out += data
        return bytes(out)

    def break_off(self) -> None:
        """Wakes whoever reads or writes."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def close(self) -> None:
        self.break_off()
        self._sock.close()


class Source(io.RawIOBase):
    """What the broker sends on channel 0, as a file."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._rest = b""
        self._end = False

    def readable(self) -> bool:
        return True

    def readinto(self, b: Any) -> int:
        while not self._rest and not self._end:
            frame = self._stream.recv()
            if frame is None:
                raise errors.Canceled("the sender broke off")
            channel, data = frame
            if channel == DATA_IN:
                self._rest = data
            elif channel == END:
                self._end = True
            elif channel == ERROR:
                raise error_in(parse(data))
            else:
                raise ProtocolError(f"a frame on channel {channel}")
        n = min(len(b), len(self._rest))
        b[:n] = self._rest[:n]
        self._rest = self._rest[n:]
        return n


class Sink(io.RawIOBase):
    """A channel of the extension's, as a file."""

    def __init__(self, stream: Stream, channel: int) -> None:
        self._stream, self._channel = stream, channel

    def writable(self) -> bool:
        return True

    def write(self, b: Any) -> int:
        n = memoryview(b).nbytes
        if n:
            self._stream.send(self._channel, b)
        return n
