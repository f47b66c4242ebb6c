"""The process beside the broker: it loads the class and speaks the protocol."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import inspect
import logging
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections import deque
from typing import Any, Callable

import sandboxer
import sandboxer.extensions
from sandboxer import _wire, errors, models
from sandboxer._adapt import FULL, STREAMS, VERBS, Adapter

PROTOCOLS = [1]
PROGRAM = f"sandboxer for Python {sandboxer.__version__}"
CONCURRENCY = 16
WAITING = 1024  # calls that wait for a thread or their turn
MAX_STREAMS = 256
HELLO_TIME = 9.0  # of the 10 seconds that the broker gives
CANCEL_TIME = 1.5  # of its 2 seconds
MAX_LOG = 16 << 10

log = logging.getLogger("sandboxer")


class Misconfigured(Exception):
    """What the extension's file says does not work; at is the place in it."""

    def __init__(self, at: str, message: str) -> None:
        super().__init__(message)
        self.at = at


def load(hello: dict[str, Any]) -> Any:
    """Makes the object of the class that the handler names."""
    handler, path = str(hello.get("handler") or ""), [str(p) for p in hello.get("path") or []]
    module, colon, name = handler.partition(":")
    if not colon or not module or not name.isidentifier():
        raise Misconfigured("handler", f"{handler!r} is no module:Class")
    sys.path[0:0] = path
    # Ours come first, so that base is always ours.
    sandboxer.extensions.__path__.extend(path)
    importlib.invalidate_caches()
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as e:
        where = ", ".join(path) or "nowhere: the file names no path"
        if e.name and (module == e.name or module.startswith(e.name + ".")):
            raise Misconfigured("handler", f"there is no module {module}; looked in {where}") from None
        traceback.print_exc()
        raise Misconfigured("handler", f"module {module} needs {e.name}, which is not installed for {sys.executable}") from None
    except Exception as e:
        traceback.print_exc()
        raise Misconfigured("handler", f"module {module} cannot be imported: {described(e)}") from None
    cls = getattr(found, name, None)
    if not inspect.isclass(cls):
        classes = [n for n, c in vars(found).items() if inspect.isclass(c) and c.__module__ == found.__name__]
        has = f"it has {', '.join(classes[:10])}" if classes else "it has none"
        raise Misconfigured("handler", f"module {module} ({found.__file__}) has no class {name}; {has}")
    missing = [
        m for m in VERBS if not callable(getattr(cls, m, None)) or getattr(getattr(cls, m), "__isabstractmethod__", False)
    ]
    if missing:
        raise Misconfigured("handler", f"{module}:{name} has no {' and no '.join(missing)}; an extension has {', '.join(VERBS)}")
    try:
        return construct(cls, hello.get("config") or {})
    except Exception as e:
        traceback.print_exc()
        raise Misconfigured("handler", f"{name}() failed: {described(e)}") from None


def construct(cls: type, config: dict[str, Any]) -> Any:
    """Calls the class with the configuration if its constructor takes one."""
    init = inspect.signature(cls.__init__) if cls.__init__ is not object.__init__ else None
    params = list(init.parameters.values())[1:] if init else []
    if any(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL) for p in params):
        return cls(config)
    if any(p.name == "config" or p.kind == p.VAR_KEYWORD for p in params):
        return cls(config=config)
    obj = cls()
    if not hasattr(obj, "config"):
        with contextlib.suppress(AttributeError):
            obj.config = config
    return obj


def described(e: BaseException) -> str:
    """An exception for who wrote the class and its file; never for callers of sandboxes."""
    if isinstance(e, SyntaxError):
        return f"{e.filename}:{e.lineno}: {e.msg}"
    return _wire.clean(f"{type(e).__name__}: {e}" if str(e) else type(e).__name__, 500)


class Call:
    """One request under way."""

    def __init__(self, host: "Host", id: int, method: str, params: dict, stream: str, timeout_ms: Any) -> None:
        self.host, self.id, self.method, self.params, self.token = host, id, method, params, stream
        self.deadline = time.monotonic() + timeout_ms / 1000 if timeout_ms is not None else None
        self._lock = threading.Lock()
        self._answered = False
        self._hooks: list[Callable[[], None]] = []
        self.request: models.Request | None = None
        self.cancelled = False
        self.running = False

    def answer(self, **body: Any) -> None:
        """Answers once; what comes later is dropped."""
        with self._lock:
            if self._answered:
                return
            self._answered = True
        self.host.calls.pop(self.id, None)
        try:
            self.host.lines.write({"id": self.id, **body})
        except (ValueError, TypeError) as e:
            fault = errors.Internal(f"{self.method}: the answer cannot be sent: {_wire.clean(e, 200)}")
            self.host.lines.write({"id": self.id, "error": _wire.error_out(fault)})
        except OSError:
            os._exit(0)  # the broker is gone

    def fail(self, e: errors.SandboxError) -> None:
        self.answer(error=_wire.error_out(e))

    def on_cancel(self, f: Callable[[], None]) -> None:
        with self._lock:
            if not self.cancelled:
                self._hooks.append(f)
                return
        f()

    def cancel(self) -> None:
        with self._lock:
            self.cancelled = True
            hooks, self._hooks = self._hooks, []
        if self.request is not None:
            self.request.cancelled.set()
        for f in hooks:
            f()
        left = errors.Canceled(f"{self.method} was canceled")
        if self.token and self.running:
            # It stops what it does first.
            t = threading.Timer(CANCEL_TIME, self.fail, (left,))
            t.daemon = True
            t.start()
        else:
            self.fail(left)


class Turns:
    """Runs calls in a bounded number of threads, those of one sandbox one after the other."""

    def __init__(self, threads: int) -> None:
        self._ready: deque = deque()
        self._waiting: dict[str, deque] = {}
        self._n = 0
        self._cond = threading.Condition()
        self._most, self._idle, self._threads = threads, 0, 0

    def submit(self, key: str | None, job: Callable[[], None]) -> bool:
        """Takes a job; False if there are too many."""
        with self._cond:
            if self._n >= WAITING:
                return False
            self._n += 1
            if key is not None and key in self._waiting:
                self._waiting[key].append((key, job))
                return True
            if key is not None:
                self._waiting[key] = deque()
            self._push((key, job))
        return True

    def _push(self, item: tuple) -> None:
        self._ready.append(item)
        if self._idle < len(self._ready) and self._threads < self._most:
            self._threads += 1
            threading.Thread(target=self._work, daemon=True).start()
        self._cond.notify()

    def _work(self) -> None:
        while True:
            with self._cond:
                self._idle += 1
                while not self._ready:
                    self._cond.wait()
                self._idle -= 1
                key, job = self._ready.popleft()
                self._n -= 1
            try:
                job()
            finally:
                with self._cond:
                    if key is not None:
                        if self._waiting[key]:
                            self._push(self._waiting[key].popleft())
                        else:
                            del self._waiting[key]


class Notifier(logging.Handler):
    """Sends what the class logs to the broker's log."""

    def __init__(self, lines: _wire.Lines) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, r: logging.LogRecord) -> None:
        levels = ((logging.ERROR, "error"), (logging.WARNING, "warn"), (logging.INFO, "info"))
        level = next((name for n, name in levels if r.levelno >= n), "debug")
        try:
            text = self.format(r).encode("utf-8", "replace").decode("utf-8")
            if len(text) > MAX_LOG:
                text = text[: MAX_LOG // 2] + " … " + text[-MAX_LOG // 2 :]
            self._lines.write({"method": "log", "params": {"level": level, "message": text, "attrs": {"logger": r.name}}})
        except Exception:
            self.handleError(r)


class Host:
    """One connection to the broker."""

    def __init__(self, lines: _wire.Lines, hello: dict[str, Any], ext: Any) -> None:
        self.lines, self.hello = lines, hello
        self.owner = str(hello.get("owner") or "")
        self.adapter = Adapter(ext, self.owner, os.getcwd())
        self.description = self.adapter.description()
        self.calls: dict[int, Call] = {}
        n = hello.get("concurrency")
        self.turns = Turns(n if isinstance(n, int) and 0 < n <= 1024 else CONCURRENCY)
        self.streams = threading.Semaphore(MAX_STREAMS)
        self.methods = {*VERBS}
        for cap in self.description["capabilities"]:
            self.methods.update(FULL.get(cap, ()))
        for cap, methods in {
            "quote": ("estimate_cost",),
            "meter": ("meter_actual",),
            "snapshot": ("snapshot", "restore_from_snapshot", "drop_snapshot", "list_snapshots"),
        }.items():
            if cap in self.description["capabilities"]:
                self.methods.update(methods)

    def run(self) -> None:
        while True:
            line = self.lines.read()
            if line is None:
                return
            method, id = line.get("method"), line.get("id")
            if not isinstance(method, str):
                continue  # the answer of something that was not asked
            params = line.get("params")
            params = params if isinstance(params, dict) else {}
            if id is None:
                if method == "cancel" and isinstance(params.get("id"), int):
                    call = self.calls.get(params["id"])
                    if call is not None:
                        call.cancel()
                continue
            if not isinstance(id, int) or isinstance(id, bool) or not 1 <= id <= 1 << 53 or id in self.calls:
                raise _wire.ProtocolError(f"a request with the id {_wire.clean(repr(id), 40)}")
            timeout = line.get("timeout_ms")
            if timeout is not None and (not isinstance(timeout, (int, float)) or isinstance(timeout, bool)):
                raise _wire.ProtocolError("a timeout_ms that is no number")
            stream = line.get("stream") or ""
            if stream and (not isinstance(stream, str) or not re.fullmatch(r"[0-9a-f]{32}", stream)):
                raise _wire.ProtocolError("a token that is none")
            self.begin(Call(self, id, method, params, stream, timeout))

    def begin(self, call: Call) -> None:
        self.calls[call.id] = call
        if call.method not in self.methods:
            call.fail(errors.Unsupported(f"{self.adapter.cls.__name__} has no {call.method}"))
            return
        if call.method in STREAMS:
            if not call.token:
                call.fail(errors.Invalid(f"{call.method} needs a stream"))
            elif not self.streams.acquire(blocking=False):
                call.fail(errors.Exhausted(f"{MAX_STREAMS} streams are under way", retry_after=1))
            else:
                call.running = True
                threading.Thread(target=self.serve_stream, args=(call,), daemon=True).start()
            return
        try:
            key = self.adapter.turn(call.method, call.params)
        except (TypeError, ValueError):
            call.fail(errors.Invalid(f"{call.method}: params are wrong"))
            return
        if not self.turns.submit(key, lambda: self.serve(call)):
            call.fail(errors.Exhausted(f"{WAITING} calls are waiting already", retry_after=1))

    def enter(self, call: Call) -> None:
        """Makes the request of this thread's call."""
        p = call.params
        id, gen = self.adapter.identity(p)
        spec = p.get("spec") or {}
        snap = p.get("snapshot") or {}
        r = models.Request(
            sandbox_id=id,
            generation=gen,
            owner=self.owner,
            host=p.get("host") or "",
            env={k: _wire.text_in(v) for k, v in (p.get("env") or {}).items()},
            spec=spec,
            stamp=_stamp(p.get("stamp")),
            snapshot_id=snap.get("snapshot_id") or (p.get("id") or "" if call.method == "snapshot" else ""),
            deadline=call.deadline,
            progress=lambda *a: self.progress(call, *a),
        )
        call.request = r
        if call.cancelled:
            r.cancelled.set()
        models._current.set(r)

    def progress(self, call: Call, step: str, done: int, total: int) -> None:
        params = {"id": call.id, "step": _wire.clean(step, 200), "done": int(done), "total": int(total)}
        if call.id in self.calls:
            self.lines.write({"method": "progress", "params": params})

    def serve(self, call: Call) -> None:
        if call.cancelled:  # before it began: nothing was done
            return
        if call.deadline is not None and time.monotonic() > call.deadline:
            call.fail(errors.Timeout(f"{call.method} waited too long for its turn", untouched=True))
            return
        call.running = True
        try:
            self.enter(call)
            call.answer(result=getattr(self.adapter, call.method)(call.params))
        except BaseException as e:
            call.fail(self.told(call, e))

    def told(self, call: Call, e: BaseException) -> errors.SandboxError:
        """What the broker is told of an exception."""
        name = f"{self.adapter.cls.__name__}.{call.method}"
        if isinstance(e, errors.SandboxError):
            if e.__cause__ is not None or e.kind == "internal":
                log.info("%s", name, exc_info=e)
            return e
        if isinstance(e, NotImplementedError):
            return errors.Unsupported(str(e) or f"{self.adapter.cls.__name__} does not support {call.method}")
        if call.method in ("provision", "restore_from_snapshot"):
            if isinstance(e, KeyError):
                log.info("%s", name, exc_info=e)
                key = e.args[0] if e.args else ""
                return errors.Invalid(f"{name} needs {_wire.clean(repr(key), 100)}, which is missing")
            if isinstance(e, ValueError):
                log.info("%s", name, exc_info=e)
                return errors.Invalid(str(e) or f"{name} refused the request")
        log.error("%s", name, exc_info=e)
        return errors.Internal(f"{name} failed with {type(e).__name__}; the log of the broker has more")

    def serve_stream(self, call: Call) -> None:
        stream = None
        try:
            self.enter(call)
            stream = _wire.Stream(str(self.hello.get("streams") or ""), call.token)
            if call.method != "exec":
                call.on_cancel(stream.break_off)
            getattr(self, f"_{_SHAPES[call.method]}")(call, stream)
            call.answer(result={})
        except BaseException as e:
            if call.cancelled:
                fault: errors.SandboxError = errors.Canceled(f"{call.method} was canceled")
            elif isinstance(e, (BrokenPipeError, ConnectionResetError)) and stream is not None:
                fault = errors.Canceled(f"the stream of {call.method} was closed")
            else:
                fault = self.told(call, e)
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.send(_wire.ERROR, _wire.dump(_wire.error_out(fault)))
            call.fail(fault)
        finally:
            if stream is not None:
                stream.close()
            self.streams.release()

    def _exec(self, call: Call, stream: _wire.Stream) -> None:
        self.adapter.exec(call.params, stream, call.on_cancel)
        if call.cancelled:
            raise errors.Canceled("exec was canceled")

    def _out(self, call: Call, stream: _wire.Stream) -> None:
        """Values or bytes, after the answer that they have begun."""
        items = getattr(self.adapter, call.method)(call.params)
        try:
            # What is wrong from the start is the answer.
            item = next(items, None)
            call.answer(result={})
            while item is not None:
                stream.send(_wire.DATA_OUT, item if isinstance(item, (bytes, bytearray, memoryview)) else _wire.dump(item))
                item = next(items, None)
            stream.send(_wire.END)
        finally:
            if hasattr(items, "close"):
                items.close()

    def _in(self, call: Call, stream: _wire.Stream) -> None:
        import io

        getattr(self.adapter, call.method)(call.params, io.BufferedReader(_wire.Source(stream), 64 << 10))
        stream.send(_wire.END)

    def _write(self, call: Call, stream: _wire.Stream) -> None:
        self.adapter.archive(call.params, _wire.Sink(stream, _wire.DATA_OUT))
        stream.send(_wire.END)

    def _both(self, call: Call, stream: _wire.Stream) -> None:
        import socket

        conn = self.adapter.dial(call.params)
        call.answer(result={})

        def back() -> None:
            with contextlib.suppress(OSError):
                while True:
                    data = conn.recv(64 << 10)
                    if not data:
                        break
                    stream.send(_wire.DATA_OUT, data)
                stream.send(_wire.END)
                return
            stream.break_off()

        t = threading.Thread(target=back, daemon=True)
        t.start()
        try:
            while True:
                frame = stream.recv()
                if frame is None or frame[0] == _wire.ERROR:
                    break
                if frame[0] == _wire.DATA_IN:
                    conn.sendall(frame[1])
                elif frame[0] == _wire.END:
                    with contextlib.suppress(OSError):
                        conn.shutdown(socket.SHUT_WR)
        except (OSError, _wire.ProtocolError):
            pass
        finally:
            with contextlib.suppress(OSError):
                conn.shutdown(socket.SHUT_RDWR)
            t.join(5)
            conn.close()


_SHAPES = {
    "exec": "exec",
    "read_file": "out",
    "list_files": "out",
    "list_running": "out",
    "list_snapshots": "out",
    "write_file": "in",
    "unarchive": "in",
    "archive": "write",
    "dial": "both",
}


def _stamp(v: Any) -> bytes:
    import base64

    return base64.b64decode(v) if isinstance(v, str) else b""


def main() -> None:
    """Serves one connection, until its end."""
    # Nobody but us writes to the control connection: neither print nor a subprocess.
    fd_in, fd_out = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    sys.stdout = sys.__stdout__ = sys.stderr
    with contextlib.suppress(OSError):
        os.set_inheritable(3, False)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    lines = _wire.Lines(fd_in, fd_out)
    try:
        _main(lines)
    except _wire.ProtocolError as e:
        print(f"the broker sent {e}", file=sys.stderr, flush=True)
        os._exit(1)
    except OSError:
        pass
    # Calls under way are given up: the journal knows of them.
    os._exit(0)


def _main(lines: _wire.Lines) -> None:
    late = threading.Timer(10, os._exit, (1,))
    late.daemon = True
    late.start()
    first = lines.read()
    late.cancel()
    if first is None:
        return
    hello = first.get("hello")
    if not isinstance(hello, dict) or not isinstance(hello.get("protocols"), list):
        raise _wire.ProtocolError("something before its hello")
    answer: dict[str, Any] = {"protocols": PROTOCOLS, "program": PROGRAM}
    if not set(PROTOCOLS) & {p for p in hello["protocols"] if isinstance(p, int)}:
        lines.write({"hello": answer})
        return

    def slow() -> None:
        faulthandler.dump_traceback(all_threads=True)
        answer["error"] = _wire.error_out(errors.Unavailable("the class did not open within 9 seconds; the log shows where it is"))
        lines.write({"hello": answer})
        os._exit(1)

    timer = threading.Timer(HELLO_TIME, slow)
    timer.daemon = True
    timer.start()
    host = None
    try:
        ext = load(hello)
        host = Host(lines, hello, ext)
        answer["description"] = host.description
        _wire.dump(answer)
    except Misconfigured as e:
        message = _wire.clean(e)
        answer.pop("description", None)
        answer["error"] = {"kind": "invalid", "message": message, "faults": [{"at": e.at, "message": message}]}
    except BaseException as e:
        traceback.print_exc()
        answer.pop("description", None)
        answer["error"] = {"kind": "internal", "message": f"the extension cannot be described: {described(e)}"}
    timer.cancel()
    lines.write({"hello": answer})
    if "error" in answer:
        return
    root = logging.getLogger()
    root.addHandler(Notifier(lines))
    root.setLevel(logging.INFO)
    host.run()
