"""A broker for tests: it starts a real host process and speaks the protocol with it."""

import json
import os
import queue
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading

HERE = os.path.dirname(os.path.abspath(__file__))
HOST = os.path.join(os.path.dirname(HERE), "sandboxer", "host.py")
WAIT = 60


class Refused(Exception):
    def __init__(self, error):
        super().__init__(json.dumps(error))
        self.kind, self.message, self.error = error["kind"], error["message"], error


class Broker:
    """One directory of an extension, and at most one host process at a time."""

    def __init__(self, modules, handler, **hello):
        self.root = tempfile.mkdtemp(prefix="sandboxer-py-test-")
        self.dir, self.path, self.sockets = (os.path.join(self.root, n) for n in ("dir", "path", "sockets"))
        for d in (self.dir, self.path, self.sockets):
            os.mkdir(d, 0o700)
        for name, text in modules.items():
            with open(os.path.join(self.path, name), "w") as f:
                f.write(text)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(os.path.join(self.sockets, "streams"))
        self.listener.listen(100)
        self.hello = {
            "protocols": [1], "program": "test", "extension": "ext.test", "owner": "owner1", "dir": self.dir,
            "streams": "/proc/self/fd/3/streams", "handler": handler, "path": [self.path], "config": {}, **hello,
        }
        self.p = None
        self.last = 0
        self.tokens = {}
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                c, _ = self.listener.accept()
            except OSError:
                return
            token = b""
            while not token.endswith(b"\n"):
                token += c.recv(1)
            self.tokens[token.strip().decode()].put(c)

    def start(self, hello=True):
        fd = os.open(self.sockets, os.O_RDONLY)

        def third():
            os.dup2(fd, 3)

        self.p = subprocess.Popen(
            [sys.executable, "-I", "-u", HOST], cwd=self.dir, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, preexec_fn=third, close_fds=False,
        )
        os.close(fd)
        self.answers, self.notes, self.bad, self.stderr = {}, [], [], []
        self.first = queue.Queue()
        self.ended = threading.Event()
        threading.Thread(target=self._read, args=(self.p,), daemon=True).start()
        self.errs = threading.Thread(target=lambda p: self.stderr.extend(p.stderr), args=(self.p,), daemon=True)
        self.errs.start()
        if hello:
            self.write({"hello": self.hello})
            return self.first.get(timeout=WAIT)["hello"]

    def _read(self, p):
        first = True
        for line in p.stdout:
            try:
                v = json.loads(line.decode("utf-8"))
            except ValueError:
                self.bad.append(line)
                continue
            if first:
                self.first.put(v)
                first = False
            elif "id" in v:
                self.answers.setdefault(v["id"], queue.Queue()).put(v)
            else:
                self.notes.append(v)
        self.ended.set()

    def write(self, v):
        self.raw(json.dumps(v).encode() + b"\n")

    def raw(self, data):
        self.p.stdin.write(data)
        self.p.stdin.flush()

    def begin(self, method, stream=False, **params):
        self.last += 1
        self.answers[self.last] = queue.Queue()
        req = {"id": self.last, "method": method, "params": params}
        if stream:
            req["stream"] = secrets.token_hex(16)
            self.tokens[req["stream"]] = queue.Queue()
        self.write(req)
        return (self.last, self.tokens[req["stream"]].get(timeout=WAIT)) if stream else self.last

    def answer(self, id, timeout=WAIT):
        v = self.answers[id].get(timeout=timeout)
        if "error" in v:
            raise Refused(v["error"])
        return v["result"]

    def call(self, method, **params):
        return self.answer(self.begin(method, **params))

    def cancel(self, id):
        self.write({"method": "cancel", "params": {"id": id}})

    def kill(self):
        self.p.send_signal(signal.SIGKILL)
        self.stop()

    def stop(self):
        if self.p:
            try:
                self.p.stdin.close()
            except OSError:
                pass
            code = self.p.wait(WAIT)
            self.ended.wait(WAIT)
            self.errs.join(WAIT)
            self.p.stdout.close()
            self.p.stderr.close()
            self.p = None
            return code

    def close(self):
        self.stop()
        self.listener.close()
        shutil.rmtree(self.root)

    def file(self, name):
        return os.path.join(self.dir, name)


def new(id="abc", gen=1, host="localhost", env=None, **spec):
    spec = {"id": id, "generation": gen, "owner": "owner1", "profile": {"id": "profile.p", "extension": "ext.test"},
            "inputs": {"sandbox_id": id}, **spec}
    return {"spec": spec, "env": env or {}, "host": host, "place": "", "stamp": ""}


def send(c, channel, data=b""):
    c.sendall(struct.pack(">BI", channel, len(data)) + data)


def exactly(c, n):
    out = b""
    while len(out) < n:
        more = c.recv(n - len(out))
        if not more:
            raise EOFError
        out += more
    return out


def frames(c):
    """All frames to the end, by channel."""
    out = {}
    while True:
        try:
            channel, n = struct.unpack(">BI", exactly(c, 5))
        except (EOFError, ConnectionResetError):
            return out
        out.setdefault(channel, []).append(exactly(c, n))
        if channel in (5, 6, 7):
            return out
