"""Commands: what a class's exec gets, and a way to run one as a process of this machine."""

from __future__ import annotations

import errno
import os
import queue
import select
import signal as signals
import struct
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Callable, Optional, Sequence

from sandboxer import errors, protocol


# By these the broker finds helpers that are not in the group of the extension's process.
_MARK = "SANDBOXER_EXTENSION_MARK"
_HELPER = "SANDBOXER_EXTENSION_PROCESS"


# The most that a pipe holds.
_PIPE = 1 << 20

# Signals that wait for a class to look at them. Of sizes the last one counts.
_SIGNALS = 64

# How the kernel says that a program is there and cannot be run.
_NOT_RUNNABLE = {errno.EACCES, errno.EPERM, errno.ENOEXEC, errno.ELOOP, errno.ETXTBSY, errno.E2BIG, errno.EISDIR}

# prctl(2): what is orphaned below becomes a child of this process, and not of init.
_PR_SET_CHILD_SUBREAPER = 36


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
    started must end before exec returns. signals are names without SIG and resizes new sizes of the
    terminal, for a class that does not use run; of those nobody looks at the oldest are dropped.
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
    signals: "queue.Queue[str]" = field(default_factory=lambda: queue.Queue(_SIGNALS))
    resizes: "queue.Queue[tuple[int, int]]" = field(default_factory=lambda: queue.Queue(1))

    def run(self, argv: Sequence[str], *, env: Optional[dict[str, str]] = None, cwd: Optional[str] = None, user: str = "") -> Exit:
        """Run argv as a process of this machine with the command's streams, and return how it ended.

        argv is what reaches the inside: ["ssh", host, …]. env is the whole environment; without it
        the process has that of the extension. user is a name, a number or uid:gid; empty for who
        the extension is. A program that is not there is Exit(127), one that cannot be run Exit(126).
        Raises errors.Invalid where cwd is no directory or there is no such user, and
        errors.Unsupported for another user unless the extension runs as root.

        The process has a group of its own, which gets the command's signals. When the command is
        canceled, or its output cannot be delivered, the process is killed and, on Linux, with it
        everything that it started on this machine, wherever that has hidden; elsewhere, its group.
        In a PID namespace that was there before (nsenter) it finds only what still has its parent:
        an orphan there belongs to the namespace's first process, and runs on. A PID namespace that
        the process makes itself ends as a whole.
        What the process leaves running when it ends by itself runs on.
        """
        return _run(self, argv, env, cwd, user)


def _run(cmd: Command, argv: Sequence[str], env: Optional[dict[str, str]], cwd: Optional[str], user: str) -> Exit:
    if cwd is not None and not os.path.isdir(cwd):
        raise errors.Invalid(f"{cwd} is no directory")
    # In a session of its own it would outlive this process: it says that it belongs to it.
    env = {**(os.environ if env is None else env)}
    if _MARK in os.environ:
        env[_HELPER] = os.environ[_MARK]
    options: dict[str, Any] = {"env": env, "cwd": cwd, "start_new_session": True, **_account(user)}
    master = slave = -1
    if cmd.tty:
        import pty

        master, slave = pty.openpty()
        _resize(master, cmd.tty)
        if "user" in options:
            os.fchown(slave, options["user"], options["group"])
        options.update(stdin=slave, stdout=slave, stderr=slave)
    else:
        options.update(stdin=subprocess.PIPE if cmd.stdin else subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    started = False
    try:
        process = subprocess.Popen(list(argv), preexec_fn=_preparation(cmd.tty is not None), **options)
        started = True
    except OSError as e:
        if e.errno in (errno.ENOENT, errno.ENOTDIR):
            code = 127
        elif e.errno in _NOT_RUNNABLE:
            code = 126
        else:
            raise errors.Unavailable(f"no process can be started: {e.strerror}") from e
        (cmd.stdout if cmd.tty else cmd.stderr).write(os.fsencode(f"{argv[0]}: {e.strerror}\n"))
        return Exit(code)
    except ValueError as e:  # a NUL in a name
        raise errors.Invalid(f"the command cannot be started: {e}") from e
    finally:
        if slave >= 0:
            os.close(slave)
        if not started and master >= 0:
            os.close(master)
    over = threading.Event()
    pumps = []
    if cmd.tty:
        pumps.append(_start(_pump, master, cmd.stdout, over, cmd.canceled))
        _start(_type, cmd.stdin or protocol.io.BytesIO(), os.dup(master))
    else:
        for pipe, to in ((process.stdout, cmd.stdout), (process.stderr, cmd.stderr)):
            pumps.append(_start(_pump, pipe.fileno(), to, over, cmd.canceled))
        if cmd.stdin:
            _start(_feed, cmd.stdin, process.stdin)
    steering = _start(_steer, cmd, process.pid, master, over)
    # Its number stays its own until nobody sends to it any more.
    try:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:  # the class has others wait for its processes
        pass
    over.set()
    steering.join()
    if cmd.canceled.is_set():
        _signal(-process.pid, signals.SIGKILL)
    code = process.wait()
    for pump in pumps:
        pump.join()
    if master >= 0:
        os.close(master)
    for pipe in (process.stdout, process.stderr):
        if pipe:
            pipe.close()
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


def _account(user: str) -> dict[str, Any]:
    """Return how a process becomes user."""
    if not user:
        return {}
    import pwd

    name, _, group = user.partition(":")
    number = int(name) if name.isascii() and name.isdigit() and len(name) < 10 else None
    try:
        entry = pwd.getpwnam(name)
    except (KeyError, ValueError):
        try:
            entry = pwd.getpwuid(-1 if number is None else number)
        except (KeyError, OverflowError):
            entry = None
    if entry:
        uid, gid = entry.pw_uid, entry.pw_gid
    elif number is not None:
        uid = gid = number  # it need not be known here
    else:
        raise errors.Invalid(f"there is no user {name!r:.60}")
    if group:
        if not (group.isascii() and group.isdigit() and len(group) < 10):
            raise errors.Invalid(f"{group!r:.60} is no number of a group")
        gid = int(group)
    if (uid, gid) == (os.getuid(), os.getgid()):
        return {}
    if os.geteuid() != 0:
        raise errors.Unsupported(f"a process cannot become user {user}: the extension does not run as root")
    return {"user": uid, "group": gid, "extra_groups": os.getgrouplist(entry.pw_name, gid) if entry else [gid]}


def _preparation(tty: bool) -> Optional[Callable[[], None]]:
    """Return what a process does before it becomes the command. It is between fork and exec, where little is allowed."""
    calls: list[Callable[[], Any]] = []
    if tty:
        import fcntl
        import termios

        ioctl, number = fcntl.ioctl, termios.TIOCSCTTY
        calls.append(lambda: ioctl(0, number, 0))
    if sys.platform == "linux":
        import ctypes

        prctl = ctypes.CDLL(None).prctl
        calls.append(lambda: prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))

    def prepare() -> None:
        for call in calls:
            call()

    return prepare if calls else None


def _resize(master: int, size: tuple[int, int]) -> None:
    import fcntl
    import termios

    cols, rows = size
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))


def _pump(source: int, to: BinaryIO, over: threading.Event, canceled: threading.Event) -> None:
    """Copy until the end, or until the process is over and what it wrote is read: what it has left running may keep
    the pipe, and write on. What cannot be delivered ends the command."""
    poll = select.poll()
    poll.register(source, select.POLLIN)
    rest = _PIPE
    while rest > 0:
        ended = over.is_set()
        if not poll.poll(0 if ended else 20):
            if ended:
                return
            continue
        try:
            data = os.read(source, protocol.MAX_DATA)
        except OSError:  # EIO is the end of a terminal
            return
        if not data:
            return
        try:
            to.write(data)
        except (OSError, ValueError):
            canceled.set()
            return  # its end stays open: of a broken pipe the process would die before what it started
        if ended:
            rest -= len(data)


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
    finally:
        os.close(master)


def _steer(cmd: Command, pid: int, master: int, over: threading.Event) -> None:
    while not over.wait(0.02):
        if cmd.canceled.is_set():
            _kill(pid)
            return
        for size in _taken(cmd.resizes):
            if master >= 0:
                try:
                    _resize(master, size)
                except (OSError, struct.error):
                    pass
        for name in _taken(cmd.signals):
            number = signals.Signals.__members__.get("SIG" + name)
            if number is not None:
                _signal(-pid, number)


def _taken(waiting: queue.Queue) -> list:
    out = []
    try:
        while True:
            out.append(waiting.get_nowait())
    except queue.Empty:
        return out


def _put(waiting: queue.Queue, value: Any) -> None:
    """Add value, in place of the oldest if there is no room."""
    while True:
        try:
            waiting.put_nowait(value)
            return
        except queue.Full:
            try:
                waiting.get_nowait()
            except queue.Empty:
                pass


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except OSError:
        pass


def _kill(pid: int) -> None:
    """Kill a process and everything that it started.

    As long as it is there all of that is below it, as it is the subreaper; and stopped it starts nothing more.
    """
    if sys.platform == "linux":
        _signal(pid, signals.SIGSTOP)
        for attempt in range(400):
            state, below = _below(pid)
            if not below and state in "TtZX":
                break
            for number in below:
                _signal(number, signals.SIGKILL)
            time.sleep(min(attempt, 20) / 4000)
    _signal(-pid, signals.SIGKILL)


def _below(pid: int) -> tuple[str, list[int]]:
    """Return a process's state, and what it has started and what they have, as far as it lives."""
    states: dict[int, str] = {}
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as f:
                fields = f.read().rpartition(b")")[2].split()
        except OSError:
            continue  # it has ended
        if len(fields) < 2:
            continue
        number = int(name)
        states[number] = fields[0].decode("ascii", "replace")
        children.setdefault(int(fields[1]), []).append(number)
    found, look = [], [pid]
    while look:
        for child in children.get(look.pop(), ()):
            look.append(child)
            if states[child] not in "ZX":
                found.append(child)
    return states.get(pid, "X"), found


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
                    _put(command.resizes, (int(size["cols"]), int(size["rows"])))
                elif channel == protocol.SIGNAL:
                    _put(command.signals, payload.decode("ascii", "replace"))
                else:
                    return
        except (OSError, ValueError, KeyError, TypeError, protocol.ProtocolError):
            return
        finally:
            canceled.set()
            source.end(error)

    _start(receive)
    ended = run(command)
    if canceled.is_set():
        raise errors.Canceled("the command was canceled")
    if isinstance(ended, bool) or not isinstance(ended, (int, Exit)):
        raise TypeError(f"exec returned {type(ended).__name__}, and neither a code nor an Exit")
    if isinstance(ended, int):
        ended = Exit(ended)
    result: dict[str, Any] = {"code": ended.code}
    if ended.signal:
        result["signal"] = ended.signal
    if ended.oom_killed:
        result["oom_killed"] = True
    try:
        stream.send(protocol.RESULT, protocol.encode(result))
    except OSError as e:
        raise protocol.BrokenStream(f"the broker has left: {e}") from None
