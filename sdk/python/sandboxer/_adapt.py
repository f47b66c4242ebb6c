"""Makes an extension class keep the broker's contract: arguments, journal, answers."""

from __future__ import annotations

import base64
import inspect
import logging
import math
import os
import signal
import socket
import threading
from decimal import ROUND_HALF_EVEN, Decimal, InvalidOperation
from typing import Any, Callable, Iterable, Iterator, Mapping

from sandboxer import _wire, errors, models
from sandboxer._journal import Journal
from sandboxer.extensions.base import SandboxExtension
from sandboxer.extensions.full import Command, FullExtension

log = logging.getLogger("sandboxer")

MAX_HANDLE = 16 << 10

# Capabilities, and the methods of FullExtension that each takes.
FULL = {
    "exec": ("exec",),
    "files": ("read_file", "write_file", "stat_file", "list_files", "make_dir", "move_file", "remove_file"),
    "archive": ("archive", "unarchive"),
    "dial": ("dial",),
    "expose": ("expose",),
    "probe": ("is_alive",),
    "discover": ("discover",),
    "list": ("list_running",),
    "pause": ("pause", "resume"),
    "renew": ("renew",),
    "capacity": ("capacity",),
    "stats": ("stats",),
    "network": ("set_network",),
    "check": ("check",),
    "ports": ("list_ports",),
    "limits": ("default_limits",),
    "notices": ("notices",),
    "forget": ("forget",),
}
VERBS = ("provision", "wait_ready", "teardown")

# Methods that run in turn for each sandbox.
IN_TURN = frozenset((*VERBS, "restore_from_snapshot", "snapshot", "meter_actual", "pause", "resume", "renew", "forget"))
# Of a class that keeps the contract by itself: it may take a sandbox away from who waits for it.
IN_TURN_IDEMPOTENT = frozenset(("provision", "teardown", "restore_from_snapshot"))

STREAMS = frozenset(
    "exec read_file write_file list_files archive unarchive dial list_running list_snapshots".split()
)


class Fault(errors.Invalid):
    """The class gave something that it must not give."""

    kind = "internal"


def overrides(cls: type, base: type, name: str) -> bool:
    f = getattr(cls, name, None)
    return callable(f) and f is not getattr(base, name, None)


def micros(v: Any, what: str) -> int:
    """Millionths of a USD: the shortest decimal of a float, rounded half to even."""
    try:
        if isinstance(v, bool) or not isinstance(v, (int, float, str, Decimal)):
            raise InvalidOperation
        d = Decimal(repr(v) if isinstance(v, float) else v)
        if not d.is_finite() or d < 0:
            raise InvalidOperation
        n = int(d.scaleb(6).to_integral_value(ROUND_HALF_EVEN))
        if n >= 1 << 63:
            raise InvalidOperation
        return n
    except (InvalidOperation, ValueError):
        raise Fault(f"{what} is {_wire.clean(repr(v), 100)}; want an amount of USD that is not negative") from None


class Adapter:
    """Answers the methods of the protocol with those of one class."""

    def __init__(self, ext: Any, owner: str, dir: str) -> None:
        self.ext = ext
        self.cls = type(ext)
        self.owner = owner
        self.full = isinstance(ext, FullExtension)
        self.idempotent = getattr(ext, "idempotent", False) is True
        self.journal = Journal(os.path.join(dir, "journal"))
        self.snapshots = Journal(os.path.join(dir, "snapshots"))

    # What it is.

    def capabilities(self) -> list[str]:
        out = []
        if self.full:
            for cap, methods in FULL.items():
                has = [m for m in methods if overrides(self.cls, FullExtension, m)]
                if len(has) == len(methods):
                    out.append(cap)
                elif has:
                    missing = ", ".join(m for m in methods if m not in has)
                    log.warning("%s does not offer %s: it lacks %s", self.cls.__name__, cap, missing)
        if overrides(self.cls, SandboxExtension, "estimate_cost"):
            out.append("quote")
        if overrides(self.cls, SandboxExtension, "meter_actual"):
            out.append("meter")
        saves = all(overrides(self.cls, SandboxExtension, m) for m in ("snapshot", "restore_from_snapshot"))
        if saves and hasattr(self.ext, "supports_snapshots") and self.ext.supports_snapshots():
            out.append("snapshot")
        return out

    def description(self) -> dict[str, Any]:
        doc = [line.strip() for line in (inspect.getdoc(self.cls) or "").strip().split("\n\n")]
        if self.cls.__doc__ is None:
            doc = [""]
        get = lambda name, default: getattr(self.ext, name, default)  # noqa: E731
        out = {
            "title": _wire.clean(get("title", doc[0]), 200),
            "help": _wire.clean(get("help", " ".join(doc[1:]))),
            # A class that does not say leaves it to its file.
            "isolation_levels": list(get("isolation_levels", ("process", "container", "gvisor", "vm"))),
            "pricing_models": list(get("pricing_models", ("self-hosted", "metered"))),
            "capabilities": self.capabilities(),
            "inputs": [
                {"name": i, "help": ""} if isinstance(i, str) else dict(i)
                for i in get("inputs", ({"name": "*", "help": "as the class takes it"},))
            ],
        }
        schema = get("config_schema", None)
        if schema is not None:
            out["config_schema"] = schema
        return out

    # Arguments.

    def turn(self, method: str, params: Mapping[str, Any]) -> str | None:
        """The sandbox whose turn a call waits for."""
        if method not in (IN_TURN_IDEMPOTENT if self.idempotent else IN_TURN):
            return None
        return self.identity(params)[0] or None

    @staticmethod
    def identity(params: Mapping[str, Any]) -> tuple[str, int]:
        spec, h = params.get("spec"), params.get("handle")
        if isinstance(spec, dict):
            return str(spec.get("id") or ""), int(spec.get("generation") or 0)
        if isinstance(h, dict):
            return str(h.get("sandbox_id") or ""), int(h.get("generation") or 0)
        return str(params.get("id") or "") if "handle" not in params else "", 0

    def new(self, params: Mapping[str, Any]) -> tuple[models.Profile, dict[str, str], str]:
        spec = params["spec"]
        inputs = {k: v for k, v in (spec.get("inputs") or {}).items()}
        inputs["sandbox_id"] = spec["id"]
        host = params.get("host") or spec.get("host") or "localhost"
        return models.Profile(spec.get("profile") or {}), inputs, host

    def known(self, params: Mapping[str, Any]) -> dict[str, str]:
        """The class's own handle, for all methods but teardown; NotFound if there is none."""
        h = params["handle"]
        id, gen = self.identity(params)
        data = h.get("data")
        bare = {"sandbox_id": id, "host": h.get("host") or "localhost"}
        if self.idempotent:
            return dict(data) if data else bare
        e = self.journal.get(id)
        if e and (e["state"] == "ended" and gen in (0, e["generation"]) or gen and e["generation"] > gen):
            raise errors.NotFound(f"sandbox {id} is gone")
        if data:
            return dict(data)
        if e and e["state"] == "made" and gen in (0, e["generation"]):
            return dict(e["handle"])
        raise errors.NotFound(f"nothing is known of sandbox {id}")

    # Answers of the class.

    def strings(self, method: str, v: Any, allow: Iterable[str] = ()) -> dict[str, Any]:
        name = f"{self.cls.__name__}.{method}"
        if not isinstance(v, Mapping):
            raise Fault(f"{name} returned {type(v).__name__}; want a dict")
        for key, value in v.items():
            if key in allow and not isinstance(value, str):
                continue
            if not isinstance(key, str) or not isinstance(value, str):
                raise Fault(f"{name} returned {_wire.clean(repr(key), 100)} with a {type(value).__name__}; want strings")
            try:
                (key + value).encode("utf-8")
            except UnicodeEncodeError:
                raise Fault(f"{name} returned {_wire.clean(repr(key), 100)} with what is no text") from None
        return dict(v)

    def same(self, method: str, v: Mapping[str, Any], id: str) -> None:
        if v.get("sandbox_id", id) != id:
            got = _wire.clean(repr(v["sandbox_id"]), 100)
            raise Fault(f"{self.cls.__name__}.{method} returned sandbox_id {got}; this is sandbox {id}")

    def handle(self, method: str, v: Any, id: str) -> dict[str, str]:
        out = self.strings(method, v)
        for key in ("sandbox_id", "host"):
            if not out.get(key):
                raise Fault(f"{self.cls.__name__}.{method} returned a handle without {key}")
        self.same(method, out, id)
        if len(_wire.dump(out)) > MAX_HANDLE - 1024:
            raise Fault(f"{self.cls.__name__}.{method} returned a handle of more than {MAX_HANDLE - 1024} bytes")
        return out

    @staticmethod
    def receipt(handle: Mapping[str, str], generation: int) -> dict[str, Any]:
        out = {"sandbox_id": handle["sandbox_id"], "host": handle["host"], "data": dict(handle)}
        if generation:
            out["generation"] = generation
        return out

    def reachability(self, v: Any, id: str) -> dict[str, Any]:
        v = self.strings("wait_ready", v, ("ports",) if self.full else ())
        self.same("wait_ready", v, id)
        out: dict[str, Any] = {}
        extra = {}
        for key, value in v.items():
            if key in ("ssh", "remote_dir", "host", "compose_project", "url") or not isinstance(value, str):
                out[key] = value
            else:
                extra[key] = value
        if extra:
            out["extra"] = extra
        return out

    def report(self, v: Any, id: str, warnings: list[str]) -> dict[str, Any]:
        lists = ("removed", "kept", "warnings")
        v = self.strings("teardown", {} if v is None else v, lists)
        self.same("teardown", v, id)
        out: dict[str, list[str]] = {name: [] for name in lists}
        for key, value in v.items():
            if key not in lists:
                out["removed"].append(f"{key}: {value}")
            elif isinstance(value, str):
                out[key].append(value)
            elif isinstance(value, (list, tuple)) and all(isinstance(s, str) for s in value):
                out[key] += value
            else:
                raise Fault(f"{self.cls.__name__}.teardown returned {key!r} with a {type(value).__name__}; want strings")
        out["warnings"] += warnings
        return {k: l for k, l in out.items() if l}

    # The three verbs.

    def provision(self, params: dict) -> dict:
        return self.make("provision", params, self.ext.provision, *self.new(params))

    def restore_from_snapshot(self, params: dict) -> dict:
        snap = params["snapshot"]
        id = snap["snapshot_id"]
        r = self.snapshots.get(id)
        if r and r["state"] == "ended":
            raise errors.NotFound(f"snapshot {id} was dropped")
        meta = {"snapshot_id": id, **(snap.get("meta") or (r or {}).get("meta") or {})}
        profile, inputs, host = self.new(params)
        return self.make("restore_from_snapshot", params, self.ext.restore_from_snapshot, profile, meta, inputs, host)

    def make(self, method: str, params: dict, f: Callable, *args: Any) -> dict:
        id, gen = self.identity(params)
        host = args[-1]
        if self.idempotent:
            return self.receipt(self.handle(method, f(*args), id), gen)
        with self.journal.locked(id):
            e = self.journal.get(id)
            if e and e["generation"] > gen:
                raise errors.Conflict(f"sandbox {id} has generation {e['generation']} already")
            if e and e["state"] == "made" and e["generation"] == gen:
                return self.receipt(e["handle"], gen)
            if e and e["state"] != "ended":
                for warning in self.clear(e)[1]:
                    log.warning("%s", warning)
            self.journal.put(id, {"state": "making", "generation": gen, "host": host})
            v = f(*args)
            try:
                handle = self.handle(method, v, id)
            except Fault:
                # What it is good for is known to teardown at least.
                told = {k: s for k, s in v.items() if isinstance(k, str) and isinstance(s, str)} if isinstance(v, Mapping) else {}
                told.update(sandbox_id=id, host=told.get("host") or host)
                self.journal.put(id, {"state": "making", "generation": gen, "host": host, "told": told})
                raise
            self.journal.put(id, {"state": "made", "generation": gen, "host": host, "handle": handle})
            return self.receipt(handle, gen)

    def clear(self, e: dict, data: dict | None = None) -> tuple[Any, list[str]]:
        """Tears down what the record e, or the class's handle data, is of. It returns what the
        class said, and what may remain."""
        id, host = e["id"], e.get("host") or "localhost"
        whole = data or e.get("handle")
        handle = dict(whole or e.get("told") or {"sandbox_id": id, "host": host})
        warnings = []
        if not whole and e["state"] == "making":
            warnings.append(
                f"making sandbox {id} was cut short, and {self.cls.__name__}.teardown was asked with"
                f" {', '.join(sorted(handle))} alone: what else was begun for it may remain on {host}"
            )
        try:
            return self.ext.teardown(dict(handle)), warnings
        except errors.NotFound:
            return {}, []
        except KeyError as x:
            if whole or not x.args or x.args[0] in handle:
                raise
            log.info("teardown of %s", id, exc_info=True)
            return {}, [
                f"{self.cls.__name__}.teardown cannot find sandbox {id} without {_wire.clean(repr(x.args[0]), 100)}:"
                f" if anything was begun for it, it may remain on {host}"
            ]

    def teardown(self, params: dict) -> dict:
        h = params["handle"]
        id, gen = self.identity(params)
        data = h.get("data") or None
        if self.idempotent:
            bare = {"sandbox_id": id, "host": h.get("host") or "localhost"}
            try:
                return self.report(self.ext.teardown(dict(data or bare)), id, [])
            except errors.NotFound:
                return {}
        with self.journal.locked(id):
            e = self.journal.get(id)
            if e and gen and e["generation"] > gen:
                return {}  # it was cleared away before the newer one was made
            if e and e["state"] == "ended" and gen in (0, e["generation"]):
                return {}
            if e and (e["state"] == "ended" or gen and e["generation"] != gen):
                if not data:
                    return {}  # of that generation nothing was ever begun
                e = None
            e = e or {"id": id, "state": "unknown", "generation": gen, "host": h.get("host")}
            said, warnings = self.clear(e, data)
            out = self.report(said, id, warnings)
            self.journal.end(id, {"generation": max(gen, e["generation"])})
            return out

    def wait_ready(self, params: dict) -> dict:
        return self.reachability(self.ext.wait_ready(self.known(params)), self.identity(params)[0])

    # Money.

    def estimate_cost(self, params: dict) -> dict:
        profile, inputs, _ = self.new(params)
        ms = params["duration_ms"]
        seconds = -(-ms // 1000)
        q = call_estimate(self.ext.estimate_cost, profile, inputs, seconds)
        if q is None:
            return {"quote": None}
        if not isinstance(q, Mapping):
            q = {"amount": q}
        name = f"{self.cls.__name__}.estimate_cost: "
        setup = micros(q.get("setup") or 0, name + "setup")
        per_hour = q.get("per_hour")
        if q.get("amount") is None:
            if per_hour is None:
                raise Fault(name + "the quote has no amount")
            exact = Decimal(micros(per_hour, name + "per_hour")) * ms / 3_600_000
            amount = setup + int(exact.to_integral_value(ROUND_HALF_EVEN))
        else:
            amount = micros(q["amount"], name + "amount")
        if amount < setup:
            raise Fault(name + "the amount is less than setup, which is part of it")
        if per_hour is None:
            rate = int((Decimal(amount - setup) * 3_600_000 / ms).to_integral_value(ROUND_HALF_EVEN)) if ms else 0
        else:
            rate = micros(per_hour, name + "per_hour")
        out = {"amount": amount, "setup": setup, "per_hour": min(rate, (1 << 63) - 1), "duration_ns": ms * 1_000_000}
        if q.get("detail"):
            out["detail"] = _wire.clean(q["detail"])
        return {"quote": out}

    def meter_actual(self, params: dict) -> dict:
        h = params["handle"]
        # After teardown too: the handle is then the broker's.
        handle = dict(h["data"]) if h.get("data") else self.known(params)
        cost = self.ext.meter_actual(handle, duration_s=params["duration_ms"] / 1000)
        if cost is None:
            raise errors.Unsupported(f"{self.cls.__name__} does not know what sandbox {h['sandbox_id']} has cost")
        return {"at": models.time_out(_now()), "cost": micros(cost, f"{self.cls.__name__}.meter_actual")}

    # Snapshots.

    def snapshot(self, params: dict) -> dict:
        id = params["id"]
        handle = self.known(params)
        box, gen = self.identity(params)
        of = {"sandbox_id": box, "generation": gen}
        with self.snapshots.locked(id):
            r = self.snapshots.get(id)
            if r and r["state"] == "made":
                return r["receipt"]
            self.snapshots.put(id, {"state": "making", **of})
            typed = ("bytes", "memory", "quiesced") if self.full else ()
            meta = self.strings("snapshot", self.ext.snapshot(handle), typed)
            if not meta.get("snapshot_id"):
                raise Fault(f"{self.cls.__name__}.snapshot returned metadata without snapshot_id")
            receipt = {k: meta.pop(k) for k in typed if k in meta and not isinstance(meta[k], str)}
            receipt.update(snapshot_id=id, meta=meta)
            self.snapshots.put(id, {"state": "made", "meta": meta, "receipt": receipt, **of})
            return receipt

    def drop_snapshot(self, params: dict) -> dict:
        snap = params["snapshot"]
        id = snap["snapshot_id"]
        with self.snapshots.locked(id):
            r = self.snapshots.get(id)
            if r and r["state"] == "ended":
                return {}
            meta = {"snapshot_id": id, **(snap.get("meta") or (r or {}).get("meta") or {})}
            if self.full and overrides(self.cls, FullExtension, "drop_snapshot"):
                try:
                    self.ext.drop_snapshot(meta)
                except errors.NotFound:
                    pass
            elif r or snap.get("meta"):
                log.warning(
                    "%s cannot drop snapshots: what %s saved as %s may remain", self.cls.__name__, id, meta["snapshot_id"]
                )
            self.snapshots.end(id, {})
        return {}

    def list_snapshots(self, params: dict) -> Iterator[dict]:
        if params["owner"] != self.owner:
            return
        for r in self.snapshots.records():
            whole = r["state"] == "made"
            yield {
                "snapshot": r["receipt"] if whole else {"snapshot_id": r["id"]},
                "whole": whole,
                "sandbox_id": r["sandbox_id"],
                "generation": r["generation"],
            }

    # What a full class can do besides.

    def check(self, params: dict) -> dict:
        self.ext.check(*self.new(params))
        return {}

    def is_alive(self, params: dict) -> dict:
        try:
            handle = self.known(params)
        except errors.NotFound:
            h = params["handle"]
            if self.journal.get(h["sandbox_id"]):
                return {"liveness": "gone"}
            handle = {"sandbox_id": h["sandbox_id"], "host": h.get("host") or "localhost"}
        try:
            v = self.ext.is_alive(handle)
        except errors.NotFound:
            v = False
        v = {True: "alive", False: "gone"}.get(v, v) if isinstance(v, bool) else v
        if v not in ("alive", "gone", "unknown", "unresponsive", "oom_killed"):
            raise Fault(f"{self.cls.__name__}.is_alive returned {_wire.clean(repr(v), 100)}")
        return {"liveness": v}

    def found(self, method: str, v: Any, id: str | None = None) -> tuple[dict, models.Found]:
        if not isinstance(v, models.Found):
            v = models.Found(v)
        handle = self.handle(method, v.handle, id or dict(v.handle).get("sandbox_id", ""))
        gen = v.generation
        if not gen and not self.idempotent:
            e = self.journal.get(handle["sandbox_id"])
            gen = e["generation"] if e and e["state"] != "ended" else 0
        return self.receipt(handle, gen), v

    def discover(self, params: dict) -> dict:
        id = params["id"]
        v = self.ext.discover(id)
        if v is None:
            raise errors.NotFound(f"there is no sandbox {id}")
        receipt, f = self.found("discover", v, id)
        out: dict[str, Any] = {"handle": receipt}
        if f.stamp is not None:
            out["stamp"] = base64.b64encode(f.stamp).decode("ascii")
        if f.fuse is not None:
            out["fuse"] = models.time_out(f.fuse)
        return out

    def list_running(self, params: dict) -> Iterator[dict]:
        for v in self.ext.list_running(params["owner"]):
            yield self.found("list_running", v)[0]

    def pause(self, params: dict) -> dict:
        self.ext.pause(self.known(params))
        return {}

    def resume(self, params: dict) -> dict:
        self.ext.resume(self.known(params))
        return {}

    def renew(self, params: dict) -> dict:
        self.ext.renew(self.known(params), models.time_in(params["until"]))
        return {}

    def capacity(self, params: dict) -> dict:
        v = self.ext.capacity(params.get("host") or "")
        return dict(v) if isinstance(v, Mapping) else {"free": v}

    def stats(self, params: dict) -> dict:
        out = {name: -1 for name in ("cpu_ns", "memory_bytes", "disk_bytes", "pids", "rx_bytes", "tx_bytes")}
        out["at"] = models.time_out(_now())
        out.update(self.ext.stats(self.known(params)))
        return out

    def set_network(self, params: dict) -> dict:
        self.ext.set_network(self.known(params), models.Record(params["policy"]))
        return {}

    def expose(self, params: dict) -> dict:
        v = dict(self.ext.expose(self.known(params), params["port"]))
        v["header"] = {k: [s] if isinstance(s, str) else list(s) for k, s in (v.get("header") or {}).items()}
        return v

    def list_ports(self, params: dict) -> dict:
        return {"ports": list(self.ext.list_ports(self.known(params)))}

    def default_limits(self, params: dict) -> dict:
        profile, inputs, _ = self.new(params)
        return dict(self.ext.default_limits(profile, inputs))

    def notices(self, params: dict) -> dict:
        return {"notices": list(self.ext.notices())}

    def forget(self, params: dict) -> dict:
        h = params["handle"]
        id, gen = self.identity(params)
        handle = dict(h.get("data") or {"sandbox_id": id, "host": h.get("host") or "localhost"})
        remains = list(self.ext.forget(handle))
        if not self.idempotent:
            with self.journal.locked(id):
                e = self.journal.get(id)
                if e and gen in (0, e["generation"]):
                    self.journal.end(id, {"generation": e["generation"]})
        return {"remains": remains}

    def stat_file(self, params: dict) -> dict:
        return file_out(self.ext.stat_file(self.known(params), _wire.text_in(params["path"])))

    def make_dir(self, params: dict) -> dict:
        self.ext.make_dir(self.known(params), _wire.text_in(params["dir"]))
        return {}

    def move_file(self, params: dict) -> dict:
        self.ext.move_file(self.known(params), _wire.text_in(params["from"]), _wire.text_in(params["to"]))
        return {}

    def remove_file(self, params: dict) -> dict:
        self.ext.remove_file(self.known(params), _wire.text_in(params["path"]))
        return {}

    # Streams: each gets the stream and answered, which tells the broker that it has begun.

    def list_files(self, params: dict) -> Iterator[dict]:
        dir, after = _wire.text_in(params["dir"]), _wire.text_in(params.get("after") or "")
        for f in self.ext.list_files(self.known(params), dir, after):
            yield file_out(f)

    def read_file(self, params: dict) -> Iterator[bytes]:
        v = self.ext.read_file(self.known(params), _wire.text_in(params["path"]))
        if isinstance(v, (bytes, bytearray, memoryview)):
            return iter((bytes(v),))
        if hasattr(v, "read"):
            return _chunks(v)
        return iter(v)

    def write_file(self, params: dict, source: Any) -> None:
        mode = models.mode_in(params.get("mode") or 0)
        self.ext.write_file(self.known(params), _wire.text_in(params["path"]), mode, source)

    def archive(self, params: dict, sink: Any) -> None:
        self.ext.archive(self.known(params), _wire.text_in(params.get("dir") or ""), sink)

    def unarchive(self, params: dict, source: Any) -> None:
        self.ext.unarchive(self.known(params), _wire.text_in(params.get("dir") or ""), source)

    def dial(self, params: dict) -> socket.socket:
        return self.ext.dial(self.known(params), params["port"])

    def exec(self, params: dict, stream: Any, cancelled: Any) -> None:
        """Runs a command along its stream, to the frame that says how it ended."""
        handle, c = self.known(params), params["cmd"]
        tty = c.get("tty")
        r, w = os.pipe()
        stdin = open(r, "rb", buffering=0)
        cmd = Command(
            [_wire.text_in(a) for a in c["args"]],
            stdin=stdin,
            stdout=_wire.Sink(stream, _wire.DATA_OUT),
            stderr=_wire.Sink(stream, _wire.DATA_ERR),
            env={k: _wire.text_in(v) for k, v in (c.get("env") or {}).items()},
            dir=_wire.text_in(c.get("dir") or ""),
            user=c.get("user") or "",
            service=c.get("service") or "",
            tty=(tty["cols"], tty["rows"]) if tty else None,
        )
        cancelled(lambda: cmd.notify("cancel", None))
        feeder = threading.Thread(target=_feed, args=(stream, w if c.get("stdin") else -1, cmd), daemon=True)
        if not c.get("stdin"):
            os.close(w)
        feeder.start()
        try:
            x = self.ext.exec(handle, cmd)
            if isinstance(x, int) and not isinstance(x, bool):
                x = models.Exit(x)
            if not isinstance(x, models.Exit):
                raise Fault(f"{self.cls.__name__}.exec returned {type(x).__name__}; want an Exit or its code")
            out: dict[str, Any] = {"code": x.code}
            if x.signal:
                out["signal"] = x.signal
            if x.oom_killed:
                out["oom_killed"] = True
            if not cmd.cancelled.is_set():
                stream.send(_wire.RESULT, _wire.dump(out))
        finally:
            stdin.close()


def _feed(stream: Any, stdin: int, cmd: Command) -> None:
    """Hands a command what the broker sends."""
    try:
        while True:
            frame = stream.recv()
            if frame is None:
                break
            channel, data = frame
            if channel == _wire.DATA_IN and stdin >= 0:
                try:
                    view = memoryview(data)
                    while view:
                        view = view[os.write(stdin, view):]
                except OSError:  # nobody reads any more
                    os.close(stdin)
                    stdin = -1
            elif channel == _wire.END and stdin >= 0:
                os.close(stdin)
                stdin = -1
            elif channel == _wire.RESIZE:
                v = _wire.parse(data)
                cmd.notify("resize", (int(v["cols"]), int(v["rows"])))
            elif channel == _wire.SIGNAL:
                sig = getattr(signal, "SIG" + data.decode("ascii", "replace"), None)
                if isinstance(sig, signal.Signals):
                    cmd.notify("signal", int(sig))
            elif channel == _wire.ERROR:
                break
    except (OSError, _wire.ProtocolError, KeyError, TypeError, ValueError):
        pass
    finally:
        if stdin >= 0:
            os.close(stdin)
        cmd.notify("cancel", None)


def _chunks(f: Any) -> Iterator[bytes]:
    try:
        while True:
            data = f.read(256 << 10)
            if not data:
                return
            yield data
    finally:
        if hasattr(f, "close"):
            f.close()


def file_out(f: models.FileInfo) -> dict:
    out = {
        "path": _wire.text_out(f.path),
        "size": f.size,
        "mode": models.mode_out(f.mode),
        "mod_time": models.time_out(f.mod_time),
    }
    for name in ("owner", "group"):
        if getattr(f, name):
            out[name] = getattr(f, name)
    if f.target:
        out["target"] = _wire.text_out(f.target)
    return out


def _now() -> Any:
    from datetime import datetime, timezone

    return datetime.now(timezone.utc)


def call_estimate(f: Callable, profile: Any, inputs: dict, seconds: int) -> Any:
    """Calls estimate_cost as it is declared: (profile, inputs, *, duration_s) or
    (profile, duration)."""
    params = inspect.signature(f).parameters.values()
    places = [p for p in params if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    named = any(p.name == "duration_s" and p.kind == p.KEYWORD_ONLY or p.kind == p.VAR_KEYWORD for p in params)
    args: list[Any] = [profile]
    for p in places[1:]:
        last = len(args) == len(places) - 1
        if p.name == "inputs" or not p.name.startswith("duration") and not (last and len(places) == 2):
            if len(args) == 2 and p.default is not p.empty:
                break
            args.append(inputs if len(args) == 1 else seconds)
        else:
            args.append(seconds)
    if any(p.kind == p.VAR_POSITIONAL for p in params) and len(args) == 1:
        args.append(inputs)
    return f(*args, duration_s=seconds) if named else f(*args)
