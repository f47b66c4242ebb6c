"""The host: runs an extension class as a process that speaks the extension protocol.

The broker starts it as python3 -I -u -X utf8 …/sandboxer/host.py in the extension's private directory.
Standard input and output are the control connection; what a class prints goes to standard error.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # The package that this file is part of. The path is as it was given: a process with the rights of another user
    # might not come here by the whole one.
    sys.path.insert(0, os.path.dirname(os.path.dirname(sys.argv[0])))

import contextvars
import importlib
import inspect
import textwrap
import threading
import time
import traceback
from collections import deque
from typing import Any, Callable, Optional

import sandboxer
import sandboxer.extensions
from sandboxer import adapt, errors, protocol
from sandboxer import request as requests
from sandboxer.journal import Journal

OLDEST = (3, 9)
MAX_WAITING = 256  # requests under way, as the protocol says
DEFAULT_CONCURRENCY = 16
CANCEL_TIME = 1.5  # how long a canceled exec may take to end
STUCK_TIME = 30  # how long any canceled call may go on while others wait for it
LOOK_TIME = 1  # how often that is looked at


class Fault(Exception):
    """What is wrong with the extension's file."""

    def __init__(self, message: str, at: str = "handler") -> None:
        super().__init__(message)
        self.at = at


def one_line(text: object, most: int = 300) -> str:
    # Cut between words: the broker, which knows what is a secret, would not recognise half of one.
    return textwrap.shorten(str(text), most, placeholder="…")


def where(e: BaseException) -> str:
    """Return where in the class's own code e arose."""
    frames = traceback.extract_tb(e.__traceback__)
    here = os.path.dirname(os.path.abspath(__file__))
    for f in reversed(frames):
        if not f.filename.startswith(here) and not f.filename.startswith("<frozen"):
            return f" ({os.path.basename(f.filename)}:{f.lineno})"
    return ""


def trace_of(e: BaseException, most: int = 4000) -> str:
    """Return the end of e's traceback, cut between words as one_line is."""
    text = "".join(traceback.format_exception(type(e), e, e.__traceback__))
    if len(text) <= most:
        return text
    return "…" + "".join(text[-most:].split(maxsplit=1)[1:])


def load(handler: str, path: list[str], config: dict) -> Any:
    """Return an instance of the class that handler names. Raises Fault."""
    module, _, name = handler.partition(":")
    for at, d in enumerate(path):
        sys.path.insert(at, d)
    # The package is open for what is in path; what is in it comes first.
    sandboxer.extensions.__path__ = list(sandboxer.extensions.__path__) + list(path)
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as e:
        if e.name and (e.name == module or module.startswith(e.name + ".")):
            raise Fault(f"there is no module {module} in {', '.join(path) or 'the path, which is empty'}") from None
        raise Fault(f"module {module} cannot be imported: {one_line(e)}{where(e)}") from None
    except BaseException as e:
        raise Fault(f"module {module} cannot be imported: {type(e).__name__}: {one_line(e)}{where(e)}") from None
    cls = getattr(loaded, name, None)
    if cls is None:
        classes = sorted(n for n, v in vars(loaded).items() if inspect.isclass(v) and v.__module__ == loaded.__name__)
        has = ", ".join(classes[:10]) or "none"
        raise Fault(f"module {module} has no class {name}: its classes are {has}")
    if not inspect.isclass(cls):
        raise Fault(f"{handler} is no class")
    lacking = adapt.missing(cls)
    if lacking:
        raise Fault(f"class {name} lacks {', '.join(lacking)}: an extension has provision, wait_ready and teardown")
    half = adapt.halves(cls)
    if half:
        raise Fault(half)
    abstract = sorted(getattr(cls, "__abstractmethods__", ()))
    if abstract:
        raise Fault(f"class {name} is abstract: it lacks {', '.join(abstract)}")
    try:
        return cls(config) if takes_config(cls) else cls()
    except errors.SandboxError as e:
        if e.kind != "invalid":
            raise
        raise Fault(f"{name}(config): {one_line(e)}", at="config") from None
    except BaseException as e:
        raise Fault(f"{name}.__init__ failed: {type(e).__name__}: {one_line(e)}{where(e)}") from None


def takes_config(cls: type) -> bool:
    try:
        parameters = inspect.signature(cls).parameters.values()
    except (TypeError, ValueError):
        return True
    return any(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL) for p in parameters)


def error_of(e: BaseException, method: str, name: str) -> dict:
    """Return e as it travels."""
    if isinstance(e, errors.SandboxError):
        out: dict[str, Any] = {"kind": e.kind, "message": one_line(e.message or e.kind, 2000)}
        if e.hint:
            out["hint"] = one_line(e.hint, 2000)
        if e.retry_after is not None and e.retry_after > 0:
            out["retry_after_ms"] = int(e.retry_after * 1000)
        if e.untouched:
            out["untouched"] = True
        return out
    if isinstance(e, NotImplementedError):
        return {"kind": "unsupported", "message": one_line(e) or f"{name} does not support {method}"}
    if method in ("provision", "restore_from_snapshot", "check") and isinstance(e, (ValueError, KeyError)):
        text = f"{e.args[0]!r} is missing" if isinstance(e, KeyError) and e.args else one_line(e)
        return {"kind": "invalid", "message": one_line(text, 2000) or f"{name}.{method} refuses the request"}
    if isinstance(e, protocol.BrokenStream):
        return {"kind": "invalid" if method in ("unarchive", "write_file") else "canceled", "message": one_line(e)}
    message = f"{name}.{method} failed: {type(e).__name__}"
    return {"kind": "internal", "message": message, "public": message, "trace": trace_of(e)}


class Call:
    """One request under way."""

    def __init__(self, host: "Host", line: dict) -> None:
        self.host = host
        self.id: int = line["id"]
        self.method: str = line["method"]
        self.params: dict = line.get("params") or {}
        self.token: str = line.get("stream") or ""
        self.timeout: Optional[float] = line["timeout_ms"] / 1000 if line.get("timeout_ms") else None
        self.turn = self._turn()  # what it waits for its turn at; "" if it does not
        self.canceled = threading.Event()
        self.stuck = float("inf")  # when it is to be over
        self.stream: Optional[protocol.Stream] = None
        self._answered = False
        self._lock = threading.Lock()

    def _turn(self) -> str:
        if self.method not in adapt.IN_TURN:
            return ""
        p = self.params
        if "snapshot" in p and self.method == "drop_snapshot":
            return "snapshot " + str(p["snapshot"].get("snapshot_id"))
        return str((p.get("spec") or {}).get("id") or (p.get("handle") or {}).get("sandbox_id") or "")

    def answer(self, line: dict) -> None:
        """Send the answer, unless there was one."""
        with self._lock:
            if self._answered:
                return
            self._answered = True
        self.host.forget(self)
        try:
            self.host.lines.send({"id": self.id, **line})
        except ValueError as e:
            self.host.lines.send({"id": self.id, "error": {"kind": "internal", "message": str(e)}})

    def cancel(self) -> None:
        """The caller has left. A method that cannot be interrupted goes on; its answer is nobody's."""
        self.left()
        gone = {"error": {"kind": "canceled", "message": f"{self.method} was canceled"}}
        if self.method in adapt.ALONG:
            if self.stream is not None and self.method != "exec":
                self.stream.close()
            timer = threading.Timer(CANCEL_TIME, self.answer, [gone])
            timer.daemon = True
            timer.start()
        else:
            self.answer(gone)

    def left(self) -> None:
        """Nobody waits for the call any more."""
        self.stuck = time.monotonic() + STUCK_TIME
        self.canceled.set()
        self.host.watch()

    def listen(self, stream: protocol.Stream) -> None:
        """Wait until the broker wants no more of a stream that has no end of its own."""
        try:
            while stream.receive() is not None:
                pass
        except (OSError, ValueError, protocol.ProtocolError):
            pass
        self.left()

    def progress(self, step: str, done: int = 0, total: int = 0) -> None:
        if not self._answered:
            self.host.lines.send({"method": "progress", "params": {"id": self.id, "step": str(step), "done": int(done), "total": int(total)}})

    def run(self) -> None:
        """Do what is asked, and answer."""
        adapted = self.host.adapted
        try:
            request = adapt.request_of(self.method, self.params, adapted.owner, timeout=self.timeout, canceled=self.canceled, progress=self.progress)
            requests._current.set(request)
            do = getattr(adapted, self.method, None)
            if do is None or self.method.startswith("_"):
                raise errors.Unsupported(f"{adapted.name} does not support {self.method}")
            if self.method in adapt.ALONG:
                self.stream = self.open()
                try:
                    self.answer({"result": do(self.params, self.stream)})
                finally:
                    self.stream.close()
            elif self.method in adapt.BEGUN:
                self.begin(do(self.params))
            elif self.method in adapt.LISTS:
                found = do(self.params)
                self.begin(lambda s: [s.send(protocol.OUT, protocol.encode(v)) for v in found] and None)
            else:
                self.answer({"result": do(self.params)})
        except BaseException as e:
            if not isinstance(e, (errors.SandboxError, NotImplementedError, protocol.BrokenStream)) or isinstance(e, adapt.BadAnswer):
                self.host.log_failure(self.method, e)
            self.answer({"error": error_of(e, self.method, adapted.name)})

    def open(self) -> protocol.Stream:
        try:
            return protocol.Stream(self.host.streams, self.token)
        except OSError as e:
            raise errors.Unavailable("the broker's socket for streams cannot be reached") from e

    def begin(self, go_on: Callable[[protocol.Stream], None]) -> None:
        """Answer that the stream has begun, and go on with it."""
        stream = self.open()
        try:
            if self.method == "notify":
                threading.Thread(target=self.listen, args=(stream,), daemon=True).start()
            self.answer({"result": {}})
            try:
                go_on(stream)
                stream.send(protocol.END)
            except (protocol.BrokenStream, BrokenPipeError, ConnectionError):
                pass  # the broker wants no more
            except Exception as e:
                self.host.log_failure(self.method, e)
                stream.send(protocol.ERROR, protocol.encode(error_of(e, self.method, self.host.adapted.name)))
        except OSError:
            pass
        finally:
            stream.close()


class Host:
    """A class that is served."""

    def __init__(self, lines: protocol.Lines, adapted: adapt.Adapted, streams: str, concurrency: int) -> None:
        self.lines = lines
        self.adapted = adapted
        self.streams = streams
        self._concurrency = concurrency
        self._lock = threading.Lock()
        self._calls: dict[int, Call] = {}
        self._turns: dict[str, deque] = {}  # calls that wait behind another of their sandbox; the key is there while one runs
        self._ready: deque = deque()  # calls whose turn it is, and for which there was no thread yet
        self._running: set[Call] = set()  # calls with a thread, also those that were answered because they were canceled
        self._watching = False

    def forget(self, call: Call) -> None:
        with self._lock:
            self._calls.pop(call.id, None)

    def log_failure(self, method: str, e: BaseException) -> None:
        trace = "".join(traceback.format_exception(type(e), e, e.__traceback__))
        print(f"{self.adapted.name}.{method} failed:\n{trace}", file=sys.stderr, flush=True)

    def serve(self) -> None:
        """Read requests until the broker is done."""
        while True:
            line = self.lines.read()
            if line is None:
                return
            if "id" not in line and line.get("method") == "cancel":
                with self._lock:
                    call = self._calls.get((line.get("params") or {}).get("id"))
                if call:
                    call.cancel()
            elif isinstance(line.get("id"), int) and isinstance(line.get("method"), str):
                self.accept(Call(self, line))

    def accept(self, call: Call) -> None:
        with self._lock:
            if call.id in self._calls:
                raise protocol.ProtocolError(f"the request {call.id} comes a second time")
            full = max(len(self._calls), len(self._running)) >= MAX_WAITING
            if not full:
                self._calls[call.id] = call
                turn = call.turn
                if turn and turn in self._turns:
                    self._turns[turn].append(call)
                    return
                if turn:
                    self._turns[turn] = deque()
                    self._ready.append(call)
        if full:
            call.answer({"error": {"kind": "exhausted", "message": f"{MAX_WAITING} requests are under way already"}})
        elif call.turn:
            self.dispatch()
        else:
            with self._lock:
                self._running.add(call)
            self.start(call)

    def start(self, call: Call) -> None:
        """Run a call in a thread of its own."""
        try:
            threading.Thread(target=contextvars.Context().run, args=(self.run, call), daemon=True).start()
        except RuntimeError:
            call.answer({"error": {"kind": "exhausted", "message": "this machine has no room for another thread"}})
            self.ended(call)

    def run(self, call: Call) -> None:
        try:
            if not call.canceled.is_set():  # else it never began
                call.run()
        finally:
            self.ended(call)
            self.dispatch()

    def ended(self, call: Call) -> None:
        with self._lock:
            self._running.discard(call)
            if call.turn:
                waiting = self._turns[call.turn]
                if waiting:
                    self._ready.append(waiting.popleft())
                else:
                    del self._turns[call.turn]

    def dispatch(self) -> None:
        """Start calls for which there is room."""
        while True:
            with self._lock:
                if not self._ready or sum(1 for c in self._running if c.turn) >= self._concurrency:
                    return
                call = self._ready.popleft()
                self._running.add(call)
            self.start(call)

    def watch(self) -> None:
        """See to it that no call waits without end for one that was canceled."""
        with self._lock:
            if self._watching:
                return
            self._watching = True
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            time.sleep(LOOK_TIME)
            with self._lock:
                stuck = self._stuck(time.monotonic())
                self._watching = any(c.canceled.is_set() for c in self._running)
                if stuck is None and not self._watching:
                    return
            if stuck is not None:
                # A thread cannot be interrupted. The journal knows of it, and a new process takes its place.
                print(
                    f"{self.adapted.name}.{stuck.method} goes on {STUCK_TIME} seconds after it was canceled, and other calls wait for it: the process ends",
                    file=sys.stderr, flush=True,
                )
                os._exit(1)

    def _stuck(self, now: float) -> Optional[Call]:
        """Return a call that should be over, and that others wait for."""
        over = [c for c in self._running if c.stuck <= now]
        for call in over:
            if any(not c.canceled.is_set() for c in self._turns.get(call.turn, ())):
                return call
        slots = [c for c in over if c.turn]
        if len(slots) >= self._concurrency and any(not c.canceled.is_set() for c in self._ready):
            return slots[0]
        return over[0] if 2 * len(over) >= MAX_WAITING else None


def answer(lines: protocol.Lines, **hello: Any) -> None:
    lines.send({"hello": {"protocols": protocol.VERSIONS, "program": f"sandboxer-python {sandboxer.__version__} (Python {sys.version.split()[0]})", **hello}})


def main() -> int:
    # The class, and what it starts, must not get at the control connection.
    control_in = os.fdopen(os.dup(0), "rb")
    control_out = os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    lines = protocol.Lines(control_in, control_out)

    first = lines.read()
    if first is None:
        return 0
    hello = first.get("hello")
    if not isinstance(hello, dict):
        raise protocol.ProtocolError("the first line is no hello")
    if not set(hello.get("protocols") or []) & set(protocol.VERSIONS):
        answer(lines, error={"kind": "unsupported", "message": f"no version of the extension protocol is common: this side speaks {protocol.VERSIONS}, the other {hello.get('protocols')}"})
        return 1
    try:
        extension = load(hello.get("handler") or "", hello.get("path") or [], hello.get("config") or {})
        # Wherever the class goes, and whoever may pass the directories above.
        own = os.open(".", os.O_PATH | os.O_DIRECTORY)
        adapted = adapt.Adapted(extension, Journal(f"/proc/self/fd/{own}/journal"), hello.get("owner") or "")
        description = adapted.description()
    except Fault as e:
        answer(lines, error={"kind": "invalid", "message": str(e), "faults": [{"at": e.at, "message": str(e)}]})
        return 1
    except errors.SandboxError as e:
        answer(lines, error=error_of(e, "__init__", hello.get("handler") or ""))
        return 1
    answer(lines, description=description)
    host = Host(lines, adapted, hello.get("streams") or "", hello.get("concurrency") or DEFAULT_CONCURRENCY)
    host.serve()
    return 0


if __name__ == "__main__":
    if sys.version_info < OLDEST:
        sys.stderr.write("Python %d.%d or newer is needed, and this is %s\n" % (OLDEST + (sys.version.split()[0],)))
        sys.exit(1)
    status = 1
    try:
        status = main()
    except protocol.ProtocolError as e:
        print(f"the extension protocol is not kept: {e}", file=sys.stderr)
    except (BrokenPipeError, ConnectionError):
        status = 0
    sys.stderr.flush()
    os._exit(status)  # calls that still run are abandoned; the journal knows of them
