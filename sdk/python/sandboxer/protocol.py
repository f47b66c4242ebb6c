"""The extension protocol: lines and streams (docs/reference/extension-protocol.md of the project)."""

from __future__ import annotations

import base64
import io
import json
import os
import socket
import struct
import threading
from typing import Any, BinaryIO, Optional

VERSIONS = [1]
MAX_LINE = 1 << 20
MAX_FRAME = 1 << 20
MAX_DATA = 64 << 10
WINDOW = 1 << 20

IN, OUT, ERR, RESIZE, SIGNAL, RESULT, ERROR, END, GRANT = range(9)


class ProtocolError(Exception):
    """What the other side said does not belong to the protocol."""


def _no_duplicates(pairs: list) -> dict:
    out: dict = {}
    for name, value in pairs:
        if name in out:
            raise ProtocolError(f"the name {name!r} is there twice")
        out[name] = value
    return out


def _no_constant(text: str) -> None:
    raise ProtocolError(f"{text} is no JSON")


def decode(data: bytes) -> Any:
    """Read one JSON document."""
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except (ValueError, RecursionError) as e:
        raise ProtocolError(f"it is no JSON: {e}") from None


def encode(value: Any) -> bytes:
    """Write one JSON document on one line."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode("utf-8", "replace")


class Lines:
    """The control connection. Lines are sent from several threads and read by one."""

    def __init__(self, reader: BinaryIO, writer: BinaryIO) -> None:
        self._reader = reader
        self._writer = writer
        self._sending = threading.Lock()

    def read(self) -> Optional[dict]:
        """Return the next line; None at the end."""
        line = self._reader.readline(MAX_LINE + 1)
        if not line:
            return None
        if not line.endswith(b"\n"):
            raise ProtocolError("a line is cut off, or too long")
        value = decode(line)
        if not isinstance(value, dict):
            raise ProtocolError("a line is no JSON object")
        return value

    def send(self, value: dict) -> None:
        """Send one line. ValueError: it is too long."""
        data = encode(value) + b"\n"
        if len(data) > MAX_LINE:
            raise ValueError(f"a message of {len(data)} bytes is too long: at most {MAX_LINE}")
        with self._sending:
            self._writer.write(data)
            self._writer.flush()


def text(value: Any) -> str:
    """Return a name, argument or path: bytes that are no UTF-8 become as os.fsdecode has them."""
    if isinstance(value, dict):
        return os.fsdecode(base64.b64decode(value["base64"], validate=True))
    if not isinstance(value, str):
        raise ProtocolError(f"{value!r:.40} is no text")
    return value


def travel(value: Any) -> Any:
    """Return a name, argument or path as it travels."""
    raw = os.fsencode(value)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(raw).decode("ascii")}


class Stream:
    """The connection of one request for bytes."""

    def __init__(self, path: str, token: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(10)
            self._socket.connect(path)
            self._socket.sendall(token.encode("ascii") + b"\n")
            self._socket.settimeout(None)
        except OSError:
            self._socket.close()
            raise
        self._reader = self._socket.makefile("rb", buffering=MAX_DATA)
        self._sending = threading.Lock()

    def send(self, channel: int, payload: bytes = b"") -> None:
        """Send one frame."""
        with self._sending:
            self._socket.sendall(struct.pack(">BI", channel, len(payload)) + payload)

    def send_data(self, channel: int, data: bytes) -> None:
        """Send data in as many frames as it takes."""
        view = memoryview(data)
        for at in range(0, len(view), MAX_DATA):
            self.send(channel, bytes(view[at : at + MAX_DATA]))

    def receive(self) -> Optional[tuple[int, bytes]]:
        """Return the next frame; None if the other side has closed."""
        head = self._read(5)
        if head is None:
            return None
        channel, size = struct.unpack(">BI", head)
        if size > MAX_FRAME or channel > GRANT:
            raise ProtocolError("a frame does not belong to the protocol")
        payload = self._read(size) if size else b""
        if payload is None:
            raise ProtocolError("a frame is cut off")
        return channel, payload

    def _read(self, size: int) -> Optional[bytes]:
        data = self._reader.read(size)
        return data if len(data) == size else None

    def close(self) -> None:
        """Close the connection; whoever waits on it goes on."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._socket.close()


class BrokenStream(OSError):
    """The broker has left, or could not read what it was to send."""


class DataReader(io.RawIOBase):
    """The data that the broker sends, as a file."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._rest = memoryview(b"")
        self._ended = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            if self._ended:
                return 0
            try:
                frame = self._stream.receive()
            except (OSError, ValueError, ProtocolError) as e:
                raise BrokenStream(f"the stream broke: {e}") from None
            if frame is None:
                raise BrokenStream("the broker has closed the stream before its end")
            channel, payload = frame
            if channel == END:
                self._ended = True
            elif channel == ERROR:
                raise BrokenStream(str(decode(payload).get("message") or "what was to be sent could not be read"))
            elif channel == IN:
                self._rest = memoryview(payload)
            else:
                raise BrokenStream(f"a frame came on channel {channel}")
        n = min(len(buffer), len(self._rest))
        buffer[:n] = self._rest[:n]
        self._rest = self._rest[n:]
        return n


class DataWriter(io.RawIOBase):
    """What is written goes to the broker."""

    def __init__(self, stream: Stream, channel: int) -> None:
        self._stream = stream
        self._channel = channel

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        data = bytes(data)
        try:
            self._stream.send_data(self._channel, data)
        except (OSError, ValueError) as e:
            raise BrokenStream(f"the broker has left: {e}") from None
        return len(data)
