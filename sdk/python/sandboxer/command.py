"""Commands: what a class's exec gets, and a way to run one as a process of this machine."""

from __future__ import annotations

import os
import queue
import select
import signal as signals
import struct
import subprocess
import threading
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Optional, Sequence

from sandboxer import protocol


# By these the broker finds helpers that are not in the group of the extension's process.
_MARK = "SANDBOXER_EXTENSION_MARK"
_HELPER = "SANDBOXER_EXTENSION_PROCESS"


# The most that a pipe holds.
_PIPE = 1 << 20


@dataclass
class Exit:
    """How a command ended. Killed by signal n, code is 128+n and signal its name without SIG."""

    code: int
    signal: str = ""
    oom_killed: bool = False


class _Input(protocol.io.RawIOBase):
    """What has arrived of a command's input and was not read yet."""

    def __init__(self, grant: Any) -> None:
        self._data = bytearray()
        self._change = threading.Condition()
        self._end: Optional[Exception] = None
        self._ended = False
        self._owed = 0
        self._grant = grant

    def readable(self) -> bool:
        return True

    def add(self, data: bytes) -> None:
        with self._change:
            if len(self._data) + len(data) > protocol.WINDOW:
                raise protocol.ProtocolError("more input comes than was granted")
            self._data += data
            self._change.notify_all()

    def end(self, error: Optional[Exception] = None) -> None:
        with self._change:
            if not self._ended:
                self._ended, self._end = True, error
                self._change.notify_all()

    def readinto(self, buffer: Any) -> int:
        with self._change:
            while not self._data and not self._ended:
                self._change.wait()
            n = min(len(buffer), len(self._data))
            buffer[:n] = self._data[:n]
            del self._data[:n]
            if n == 0 and self._end is not None:
                raise self._end
            self._owed += n
            grant, ended = 0, self._ended
            if self._owed >= protocol.WINDOW // 4:
                grant, self._owed = self._owed, 0
        if grant and not ended:
            self._grant(grant)
        return n


@dataclass
class Command:
    """A command that is to run inside a sandbox, with its streams.

    args[0] is looked up inside. env is added to the sandbox's environment. dir is empty for the
    workspace, user for the default one. tty is (cols, rows) where a terminal is wanted; its output
    is stdout's. stdin is None where there is no input. When canceled is set the command and what it
    started must end before exec returns.
    """

    args: list[str]
    env: dict[str, str]
    dir: str
    user: str
    service: str
    tty: Optional[tuple[int, int]]
    stdin: Optional[BinaryIO]
    stdout: BinaryIO
    stderr: BinaryIO
    canceled: threading.Event
    signals: "queue.Queue[str]" = field(default_factory=queue.Queue)
    resizes: "queue.Queue[tuple[int, int]]" = field(default_factory=queue.Queue)

    def run(self, argv: Sequence[str], *, env: Optional[dict[str, str]] = None, cwd: Optional[str] = None) -> Exit:
        """Run argv as a process of this machine with the command's streams, and return how it ended.

        argv is what reaches the inside: ["ssh", host, …]. A program that is not there is Exit(127).
        The process has a group of its own, which is killed when the command is canceled and gets
        its signals.
        """
        return _run(self, argv, env, cwd)


def _run(cmd: Command, argv: Sequence[str], env: Optional[dict[str, str]], cwd: Optional[str]) -> Exit:
    master = -1
    # In a session of its own it would outlive this process: it says that it belongs to it.
    env = {**(os.environ if env is None else env)}
    if _MARK in os.environ:
        env[_HELPER] = os.environ[_MARK]
    options: dict[str, Any] = {"env": env, "cwd": cwd, "start_new_session": True}
    if cmd.tty:
        import pty

        master, slave = pty.openpty()
        _resize(master, cmd.tty)
        options.update(stdin=slave, stdout=slave, stderr=slave, start_new_session=False, preexec_fn=_terminal)
    else:
        options.update(stdin=subprocess.PIPE if cmd.stdin else subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        process = subprocess.Popen(list(argv), **options)
    except (FileNotFoundError, NotADirectoryError, PermissionError) as e:
        if master >= 0:
            os.close(master)
        cmd.stderr.write(f"{argv[0]}: {e.strerror}\n".encode())
        return Exit(126 if isinstance(e, PermissionError) else 127)
    finally:
        if cmd.tty:
            os.close(slave)
    over = threading.Event()
    pumps = []
    if cmd.tty:
        output = open(master, "rb", buffering=0, closefd=False)
        pumps.append(_start(_pump_terminal, output, cmd.stdout))
        if cmd.stdin:
            _start(_type, cmd.stdin, master)
    else:
        pumps.append(_start(_pump, process.stdout, cmd.stdout, over))
        pumps.append(_start(_pump, process.stderr, cmd.stderr, over))
        if cmd.stdin:
            _start(_feed, cmd.stdin, process.stdin)
    _start(_steer, cmd, process, master, over)
    try:
        code = process.wait()
    finally:
        over.set()
    if cmd.canceled.is_set():
        _kill(process.pid)
    for pump in pumps:
        pump.join()
    if master >= 0:
        os.close(master)
    if code >= 0:
        return Exit(code)
    try:
        name = signals.Signals(-code).name[3:]
    except ValueError:
        name = ""
    return Exit(128 - code, name)


def _start(target: Any, *args: Any) -> threading.Thread:
    thread = threading.Thread(target=target, args=args, daemon=True)
    thread.start()
    return thread


def _terminal() -> None:
    import fcntl
    import termios

    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _resize(master: int, size: tuple[int, int]) -> None:
    import fcntl
    import termios

    cols, rows = size
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))


def _pump(source: BinaryIO, to: BinaryIO, over: threading.Event) -> None:
    """Copy until the end, or until the process is over and what it wrote is read: what it has left running may keep
    the pipe, and write on."""
    poll = select.poll()
    poll.register(source, select.POLLIN)
    rest = _PIPE
    try:
        while rest > 0:
            ended = over.is_set()
            if not poll.poll(0 if ended else 20):
                if ended:
                    return
                continue
            data = os.read(source.fileno(), protocol.MAX_DATA)
            if not data:
                return
            to.write(data)
            if ended:
                rest -= len(data)
    except (OSError, ValueError):
        pass
    finally:
        source.close()


def _pump_terminal(source: BinaryIO, to: BinaryIO) -> None:
    try:
        while True:
            data = source.read(protocol.MAX_DATA)
            if not data:
                return
            to.write(data)
    except (OSError, ValueError):  # EIO is the end of a terminal
        pass


def _feed(source: BinaryIO, to: BinaryIO) -> None:
    try:
        while True:
            data = source.read(protocol.MAX_DATA)
            if not data:
                break
            to.write(data)
            to.flush()
    except (OSError, ValueError):
        pass
    try:
        to.close()
    except OSError:
        pass


def _type(source: BinaryIO, master: int) -> None:
    try:
        while True:
            data = source.read(protocol.MAX_DATA)
            if not data:
                data = b"\x04"  # the end of the input, at a terminal
                os.write(master, data)
                return
            while data:
                data = data[os.write(master, data) :]
    except (OSError, ValueError):
        pass


def _steer(cmd: Command, process: subprocess.Popen, master: int, over: threading.Event) -> None:
    while not over.wait(0.02):
        if cmd.canceled.is_set():
            _kill(process.pid)
            return
        while not cmd.resizes.empty():
            if master >= 0:
                try:
                    _resize(master, cmd.resizes.get())
                except OSError:
                    pass
        while not cmd.signals.empty():
            number = getattr(signals, "SIG" + cmd.signals.get(), None)
            if number is not None and process.poll() is None:
                try:
                    os.killpg(process.pid, number)
                except OSError:
                    pass


def _kill(group: int) -> None:
    try:
        os.killpg(group, signals.SIGKILL)
    except OSError:
        pass


def serve(stream: protocol.Stream, params: dict, canceled: threading.Event, run: Any) -> None:
    """Run run(Command) with the streams of the broker, and send how it ended."""

    def grant(n: int) -> None:
        try:
            stream.send(protocol.GRANT, struct.pack(">I", n))
        except (OSError, ValueError):
            pass

    source = _Input(grant)
    asked = params["cmd"]
    tty = asked.get("tty")
    command = Command(
        args=[protocol.text(a) for a in asked["args"]],
        env={k: protocol.text(v) for k, v in (asked.get("env") or {}).items()},
        dir=protocol.text(asked.get("dir") or ""),
        user=asked.get("user") or "",
        service=asked.get("service") or "",
        tty=(tty["cols"], tty["rows"]) if tty else None,
        stdin=source if asked.get("stdin") else None,  # type: ignore[arg-type]
        stdout=protocol.DataWriter(stream, protocol.OUT),  # type: ignore[arg-type]
        stderr=protocol.DataWriter(stream, protocol.ERR),  # type: ignore[arg-type]
        canceled=canceled,
    )

    def receive() -> None:
        error: Optional[Exception] = protocol.BrokenStream("the broker has left")
        try:
            while True:
                frame = stream.receive()
                if frame is None:
                    return
                channel, payload = frame
                if channel == protocol.IN:
                    source.add(payload)
                elif channel == protocol.END:
                    source.end()
                elif channel == protocol.ERROR:
                    source.end(protocol.BrokenStream(str(protocol.decode(payload).get("message") or "the input cannot be read")))
                elif channel == protocol.RESIZE:
                    size = protocol.decode(payload)
                    command.resizes.put((int(size["cols"]), int(size["rows"])))
                elif channel == protocol.SIGNAL:
                    command.signals.put(payload.decode("ascii", "replace"))
                else:
                    return
        except (OSError, ValueError, KeyError, TypeError, protocol.ProtocolError):
            return
        finally:
            canceled.set()
            source.end(error)

    _start(receive)
    ended = run(command)
    if isinstance(ended, bool) or not isinstance(ended, (int, Exit)):
        raise TypeError(f"exec returned {type(ended).__name__}, and neither a code nor an Exit")
    if isinstance(ended, int):
        ended = Exit(ended)
    result: dict[str, Any] = {"code": ended.code}
    if ended.signal:
        result["signal"] = ended.signal
    if ended.oom_killed:
        result["oom_killed"] = True
    stream.send(protocol.RESULT, protocol.encode(result))
