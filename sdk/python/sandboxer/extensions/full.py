"""A base class for extensions that can do more than make and remove sandboxes."""

from __future__ import annotations

import errno
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import threading
from datetime import datetime
from typing import Any, BinaryIO, Callable, Iterable, Mapping, Sequence

from sandboxer import errors
from sandboxer.extensions.base import SandboxExtension
from sandboxer.models import Exit, FileInfo, Found, Profile, Record

_CHUNK = 64 << 10


class Command:
    """A command to run in a sandbox, with its streams.

    stdin is a file with a descriptor, which a subprocess can be given; stdout and stderr
    take bytes by write. tty is (columns, rows) of the terminal that is asked for, or None.
    cancelled is set when nobody waits for the command any more: it and what it started
    must end then. watch(f) has f called with "resize" and (columns, rows), with "signal" and
    its number, and with "cancel" and None, from another thread.
    """

    def __init__(
        self,
        args: Sequence[str],
        *,
        stdin: BinaryIO,
        stdout: Any,
        stderr: Any,
        env: Mapping[str, str] | None = None,
        dir: str = "",
        user: str = "",
        service: str = "",
        tty: tuple[int, int] | None = None,
    ) -> None:
        self.args = list(args)
        self.env = dict(env or {})
        self.dir = dir
        self.user = user
        self.service = service
        self.tty = tty
        self.stdin = stdin
        self.stdout = stdout
        self.stderr = stderr
        self.cancelled = threading.Event()
        self._lock = threading.Lock()
        self._watchers: list[Callable[[str, Any], None]] = []
        self._missed: list[tuple[str, Any]] = []

    def watch(self, f: Callable[[str, Any], None]) -> None:
        with self._lock:
            self._watchers.append(f)
            missed, self._missed = self._missed, []
        for event in missed:
            f(*event)

    def notify(self, what: str, value: Any) -> None:
        """Tells watchers; who comes later hears of it then."""
        with self._lock:
            if what == "cancel":
                if self.cancelled.is_set():
                    return
                self.cancelled.set()
            watchers = list(self._watchers)
            if not watchers and len(self._missed) < 100:
                self._missed.append((what, value))
        for f in watchers:
            f(what, value)

    def run(
        self,
        argv: Sequence[str] | None = None,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Exit:
        """Runs argv (args if None) on this machine with the command's streams, and ends it
        with all that it started when the command is cancelled. A program that does not exist
        is Exit(127), one that may not be executed Exit(126), with the reason on stderr."""
        argv = list(self.args if argv is None else argv)
        if cwd is not None and not os.path.isdir(cwd):
            raise errors.Invalid(f"{cwd} is not a directory")
        master = slave = -1
        if self.tty is not None:
            master, slave = pty.openpty()
            _resize(master, self.tty)
        try:
            p = subprocess.Popen(
                argv,
                cwd=cwd,
                env=None if env is None else dict(env),
                stdin=slave if slave >= 0 else self.stdin,
                stdout=slave if slave >= 0 else subprocess.PIPE,
                stderr=slave if slave >= 0 else subprocess.PIPE,
                start_new_session=True,
                preexec_fn=_take_terminal if slave >= 0 else None,
            )
        except (FileNotFoundError, NotADirectoryError, PermissionError) as e:
            if master >= 0:
                os.close(master)
            code = 126 if isinstance(e, PermissionError) else 127
            out = self.stdout if self.tty is not None else self.stderr
            out.write(f"{argv[0]}: {e.strerror}\n".encode("utf-8", "surrogateescape"))
            return Exit(code)
        finally:
            if slave >= 0:
                os.close(slave)

        def event(what: str, value: Any) -> None:
            try:
                if what == "cancel":
                    os.killpg(p.pid, signal.SIGKILL)
                elif p.returncode is None and what == "signal":
                    os.killpg(p.pid, value)
                elif master >= 0 and what == "resize":
                    _resize(master, value)
            except OSError:
                pass  # it has ended

        self.watch(event)
        if self.cancelled.is_set():
            event("cancel", None)
        if master >= 0:
            threading.Thread(target=_type, args=(self.stdin, master), daemon=True).start()
            sources = {master: self.stdout}
        else:
            sources = {p.stdout.fileno(): self.stdout, p.stderr.fileno(): self.stderr}
        try:
            _copy(p, sources)
        except BaseException:
            event("cancel", None)
            raise
        finally:
            p.wait()
            if master >= 0:
                os.close(master)
            else:
                p.stdout.close()
                p.stderr.close()
        if p.returncode < 0:
            name = signal.Signals(-p.returncode).name[3:]
            return Exit(128 - p.returncode, name)
        return Exit(p.returncode)


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _resize(fd: int, size: tuple[int, int]) -> None:
    cols, rows = size
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))


def _type(source: BinaryIO, master: int) -> None:
    try:
        while True:
            data = os.read(source.fileno(), _CHUNK)
            view = memoryview(data or b"\x04")
            while view:
                view = view[os.write(master, view):]
            if not data:
                return
    except (OSError, ValueError):
        pass  # the terminal is gone


def _copy(p: subprocess.Popen, sources: dict[int, Any]) -> None:
    """Copies output until the process has ended and all that it wrote is read. What it left
    running may keep the pipes open."""
    r, w = os.pipe()

    def wait() -> None:
        p.wait()
        os.close(w)

    threading.Thread(target=wait, daemon=True).start()
    try:
        while True:
            poll = select.poll()
            for fd in sources:
                poll.register(fd, select.POLLIN)
            ended = p.returncode is not None
            if not ended:
                poll.register(r, select.POLLIN)
            elif not sources:
                return
            ready = poll.poll(0 if ended else None)
            if ended and not ready:
                return
            for fd, _ in ready:
                if fd == r:
                    p.wait()
                    continue
                try:
                    data = os.read(fd, _CHUNK)
                except OSError as e:
                    if e.errno != errno.EIO:  # how a terminal ends
                        raise
                    data = b""
                if data:
                    sources[fd].write(data)
                else:
                    del sources[fd]
    finally:
        os.close(r)


class FullExtension(SandboxExtension):
    """An extension that can do more. Each method here is optional, and the broker knows of
    those that a class overrides; of the methods of files, of archive and unarchive, and of
    pause and resume, it takes all or none. They are called at any time, several at once.

    Handles are as provision returned them; of a sandbox of which nothing is known here, one
    has sandbox_id and host alone. sandboxer.request() knows the generation.

    A class that keeps the whole contract by itself says idempotent = True: provision and
    restore_from_snapshot find what they made before, teardown takes a handle with sandbox_id
    and host alone, spares newer generations, and takes absence for success. Nothing is
    written down for it then.
    """

    idempotent = False

    def check(self, profile: Profile, inputs: dict[str, str], host: str) -> None:
        """Raises Invalid or Unsupported for an order that provision would refuse."""
        raise NotImplementedError

    def exec(self, handle: dict[str, str], cmd: Command) -> Exit | int:
        """Runs a command to its end; see Command.run."""
        raise NotImplementedError

    def read_file(self, handle: dict[str, str], path: str) -> Any:
        """Returns the content: bytes, a binary file, or an iterable of bytes."""
        raise NotImplementedError

    def write_file(
        self, handle: dict[str, str], path: str, mode: int, source: BinaryIO
    ) -> None:
        """Creates or replaces a file, with its parent directories."""
        raise NotImplementedError

    def stat_file(self, handle: dict[str, str], path: str) -> FileInfo:
        raise NotImplementedError

    def list_files(
        self, handle: dict[str, str], dir: str, after: str
    ) -> Iterable[FileInfo]:
        """Yields what is in dir after the name after, in the byte order of names."""
        raise NotImplementedError

    def make_dir(self, handle: dict[str, str], dir: str) -> None:
        raise NotImplementedError

    def move_file(self, handle: dict[str, str], source: str, target: str) -> None:
        raise NotImplementedError

    def remove_file(self, handle: dict[str, str], path: str) -> None:
        """Removes a file or a tree; absence is success."""
        raise NotImplementedError

    def archive(self, handle: dict[str, str], dir: str, target: Any) -> None:
        """Writes a tar of dir, or of the workspace if that is empty, to target."""
        raise NotImplementedError

    def unarchive(self, handle: dict[str, str], dir: str, source: BinaryIO) -> None:
        """Makes dir hold what the tar holds and nothing else."""
        raise NotImplementedError

    def dial(self, handle: dict[str, str], port: int) -> Any:
        """Returns a connected socket to a port inside."""
        raise NotImplementedError

    def expose(self, handle: dict[str, str], port: int) -> Mapping[str, Any]:
        """Returns url, and header if the edge wants some, of a port."""
        raise NotImplementedError

    def is_alive(self, handle: dict[str, str]) -> bool | str:
        """Whether the sandbox is there: True, False (proven), or alive, gone, unknown,
        unresponsive, oom_killed."""
        raise NotImplementedError

    def discover(self, sandbox_id: str) -> Found | Mapping[str, str] | None:
        """Finds the newest generation of a sandbox by its ID."""
        raise NotImplementedError

    def list_running(self, owner: str) -> Iterable[Found]:
        """Yields every sandbox that carries owner, in whatever condition."""
        raise NotImplementedError

    def drop_snapshot(self, snapshot_meta: dict[str, str]) -> None:
        """Removes what snapshot saved; absence is success. The metadata has snapshot_id at
        least. request().snapshot_id is the broker's name of it."""
        raise NotImplementedError

    def pause(self, handle: dict[str, str]) -> None:
        raise NotImplementedError

    def resume(self, handle: dict[str, str]) -> None:
        raise NotImplementedError

    def renew(self, handle: dict[str, str], until: datetime) -> None:
        """Moves the backend's own deadline."""
        raise NotImplementedError

    def capacity(self, host: str) -> int | Mapping[str, Any]:
        """How many further sandboxes there is room for, -1 if that is not known; or free,
        hosts and attrs."""
        raise NotImplementedError

    def stats(self, handle: dict[str, str]) -> Mapping[str, int]:
        """Some of cpu_ns, memory_bytes, memory_limit, disk_bytes, disk_limit, pids, rx_bytes
        and tx_bytes."""
        raise NotImplementedError

    def set_network(self, handle: dict[str, str], policy: Record) -> None:
        """Replaces what a running sandbox may reach."""
        raise NotImplementedError

    def list_ports(self, handle: dict[str, str]) -> Iterable[int]:
        """The ports that dial would find a listener at."""
        raise NotImplementedError

    def default_limits(self, profile: Profile, inputs: dict[str, str]) -> Mapping[str, int]:
        """What holds for limits that nobody asks for."""
        raise NotImplementedError

    def notices(self) -> Iterable[str]:
        """What an operator should know and do something about."""
        raise NotImplementedError

    def forget(self, handle: dict[str, str]) -> Iterable[str]:
        """Gives up a sandbox whose host is gone for good; returns what may remain."""
        raise NotImplementedError
