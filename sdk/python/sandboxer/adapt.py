"""Makes a class keep the contract: what it was asked is remembered, and what it says is checked."""

from __future__ import annotations

import datetime
import inspect
import itertools
import os
import stat
from decimal import ROUND_HALF_EVEN, Decimal
from typing import Any, Callable, Iterable, Optional

from sandboxer import command, errors, protocol
from sandboxer.extensions.base import SandboxExtension
from sandboxer.journal import Journal, of_sandbox, of_snapshot
from sandboxer.models import MeterQuote, Profile, micros
from sandboxer.request import Request, current

LEVELS = ["process", "container", "gvisor", "vm"]
PRICING = ["self-hosted", "metered"]

# The methods that a class may have besides the three, by the capability that they are together.
OPTIONAL = {
    "exec": ["exec"],
    "files": ["read_file", "write_file", "stat_file", "list_files", "make_dir", "move_file", "remove_file"],
    "archive": ["archive", "unarchive"],
    "dial": ["dial"],
    "expose": ["expose"],
    "probe": ["is_alive"],
    "discover": ["discover"],
    "list": ["list_running"],
    "notify": ["notify"],
    "pause": ["pause", "resume"],
    "renew": ["renew"],
    "capacity": ["capacity"],
    "stats": ["stats"],
    "notices": ["notices"],
}

# Of one directory no more than so many files are listed, and at a time so many bytes of what is said of them are held.
MAX_LISTED = 1_000_000
MAX_HELD = 16 << 20

MAX_NOTICES = 20

# The key of a snapshot's metadata that is the host's own, which the class does not see.
OF_JOURNAL = "sandboxer_journal"

VERBS = ["provision", "wait_ready", "teardown"]


class BadAnswer(errors.Internal):
    """A method returned what it may not."""


def _own(cls: type, name: str) -> bool:
    """Say whether cls has a method that is not the base class's."""
    method = getattr(cls, name, None)
    return callable(method) and method is not getattr(SandboxExtension, name, None)


def missing(cls: type) -> list[str]:
    """Return what of the three methods cls lacks, or has of the base class only."""
    return [name for name in VERBS if not _own(cls, name)]


def halves(cls: type) -> Optional[str]:
    """Return what is wrong where cls has some methods of a capability and lacks others."""
    for capability, names in OPTIONAL.items():
        have = [n for n in names if _own(cls, n)]
        if have and len(have) < len(names):
            lacking = ", ".join(n for n in names if n not in have)
            return f"{cls.__name__} has {', '.join(have)} and lacks {lacking}: {capability} needs all of them"
    return None


class Adapted:
    """An extension class as the broker calls it. One method for each of the protocol's."""

    def __init__(self, extension: Any, journal: Journal, owner: str) -> None:
        self.extension = extension
        self.journal = journal
        self.owner = owner
        self.name = type(extension).__name__

    # What it is.

    def description(self) -> dict:
        """Return what the class is, for the hello."""
        cls = type(self.extension)
        capabilities = [c for c, names in OPTIONAL.items() if all(_own(cls, n) for n in names)]
        capabilities.append("check")
        if _own(cls, "estimate_cost"):
            capabilities.append("quote")
        if _own(cls, "meter_actual"):
            capabilities.append("meter")
        if hasattr(self.extension, "supports_snapshots") and self.extension.supports_snapshots():
            capabilities.append("snapshot")
        doc = inspect.cleandoc(cls.__doc__ or "") if cls.__doc__ and cls.__doc__ != SandboxExtension.__doc__ else ""
        title, _, rest = doc.partition("\n")
        out: dict[str, Any] = {
            "title": title[:200],
            "help": rest.strip()[:4000],
            "isolation_levels": list(getattr(self.extension, "isolation_levels", LEVELS)),
            "pricing_models": list(getattr(self.extension, "pricing_models", PRICING)),
            "capabilities": capabilities,
            "inputs": [self._input(i) for i in getattr(self.extension, "inputs", None) or [
                {"name": "*", "help": f"what {self.name} takes; it does not declare its inputs", "restricted": True}
            ]],
        }
        schema = getattr(self.extension, "config_schema", None)
        if schema:
            out["config_schema"] = schema
        return out

    def _input(self, value: Any) -> dict:
        if isinstance(value, str):
            return {"name": value, "help": ""}
        return {"help": "", **value}

    # Checks of what a class returns.

    def _strings(self, method: str, value: Any, required: Iterable[str] = ()) -> dict[str, str]:
        if not isinstance(value, dict):
            raise BadAnswer(f"{self.name}.{method} returned {type(value).__name__}, and no dict")
        for key, x in value.items():
            if not isinstance(key, str):
                raise BadAnswer(f"{self.name}.{method} returned the key {key!r}, which is no string")
            if not isinstance(x, str):
                raise BadAnswer(f"{self.name}.{method} returned a {type(x).__name__} under {key!r}: every value has to be a string")
            try:
                (key + x).encode()
            except UnicodeEncodeError:
                raise BadAnswer(f"{self.name}.{method} returned under {key!a} what is no UTF-8") from None
        for key in required:
            if not value.get(key):
                raise BadAnswer(f"{self.name}.{method} returned no {key!r}")
        return value

    def _handle(self, method: str, value: Any, id: str) -> dict[str, str]:
        handle = self._strings(method, value, ["sandbox_id", "host"])
        self._same(method, handle, id)
        return handle

    def _same(self, method: str, value: dict, id: str) -> None:
        if value.get("sandbox_id", id) != id:
            raise BadAnswer(f"{self.name}.{method} returned the handle of {value['sandbox_id']!r} under 'sandbox_id', and was asked for {id!r}")

    def _travel(self, handle: dict[str, str], generation: int) -> dict:
        return {"sandbox_id": handle["sandbox_id"], "generation": generation, "host": handle["host"], "data": {"journal": self.journal.id, "handle": handle}}

    def _seen(self, handle: dict[str, str]) -> dict:
        """Return, as it travels, a handle that the class found by itself. One of which the journal knows nothing,
        because another was here before, does not name this journal: that it has no record proves nothing."""
        entry = self.journal.peek(of_sandbox(handle["sandbox_id"])) or {}
        if handle.get("generation", "").isdigit():
            generation = int(handle["generation"])
        else:
            generation = entry.get("generation") or 1
        out = self._travel(handle, generation)
        if entry.get("generation") != generation:
            del out["data"]["journal"]
        return out

    @staticmethod
    def _brought(h: dict) -> Optional[dict[str, str]]:
        """Return the class's handle that the broker has kept; None if it has none."""
        handle = (h.get("data") or {}).get("handle")
        return {str(k): str(v) for k, v in handle.items()} if isinstance(handle, dict) else None

    def _known(self, h: dict) -> dict[str, str]:
        """Return the class's handle: the broker's, the journal's, or what is known without either."""
        handle = self._brought(h)
        if handle is not None:
            return handle
        return self._recorded(h, self.journal.peek(of_sandbox(h["sandbox_id"])))

    @staticmethod
    def _recorded(h: dict, entry: Optional[dict]) -> dict[str, str]:
        if entry and entry.get("handle") and h.get("generation") in (0, None, entry.get("generation")):
            return dict(entry["handle"])
        host = h.get("host") or (entry or {}).get("host") or "localhost"
        return {"sandbox_id": h["sandbox_id"], "host": host}

    # What a class does not see, or does not say that it keeps, is refused and not dropped.

    def _refuse(self, p: dict) -> None:
        """Refuse what the request asks for beyond its profile, unless the class accepts it."""
        spec, accepts = p["spec"], set(getattr(self.extension, "accepts", ()))
        profile = spec.get("profile") or {}
        asked = []
        for name in ("image", "command", "network", "mounts", "ports", "workspace", "user"):
            value = spec.get(name)
            if value and value != profile.get(name) and name not in accepts:
                asked.append(name)
        if p.get("env") and "env" not in accepts and hasattr(self.extension, "exec"):
            asked.append("env")
        limits, own = spec.get("limits") or {}, profile.get("limits") or {}
        for name, value in limits.items():
            if value and value != own.get(name) and "limits" not in accepts and f"limits.{name}" not in accepts:
                asked.append(f"limits.{name}")
        if asked:
            raise errors.Unsupported(
                f"{self.name} does not support {', '.join(asked)} of a request",
                hint="leave it out; a class that keeps it says so: accepts = [" + ", ".join(f'"{a}"' for a in asked) + "]",
                untouched=True,
            )

    # The three verbs.

    def _make(self, p: dict, method: str, make: Callable[[], Any]) -> dict:
        spec = p["spec"]
        id, generation = spec["id"], spec["generation"]
        self._refuse(p)
        with self.journal.locked(of_sandbox(id)) as record:
            entry = record.read()
            if entry is not None:
                known = entry.get("generation") or 0
                if known > generation:
                    raise errors.Conflict(f"sandbox {id} has been made anew since")
                if known == generation and entry.get("handle"):
                    return self._travel(entry["handle"], generation)
                self._clear(entry)  # a former generation, or a call that did not come to its end
            intent = {"id": id, "generation": generation, "host": p["host"], "fuse": spec.get("fuse") or ""}
            if p.get("env") and "env" not in getattr(self.extension, "accepts", ()):
                intent["changed"] = f"the environment is not set: {self.name} does not accept one"
            record.write(intent)
            handle = self._handle(method, make(), id)
            record.write({**intent, "host": handle["host"], "handle": handle})
            return self._travel(handle, generation)

    def _clear(self, entry: dict) -> None:
        """Remove what an earlier call may have left."""
        handle = entry.get("handle") or {"sandbox_id": entry["id"], "host": entry.get("host") or "localhost"}
        try:
            self.extension.teardown(dict(handle))
        except Exception as e:
            raise errors.Unavailable(
                f"an earlier provision of sandbox {entry['id']} did not come to its end, and what it may have left "
                f"on {handle['host']} cannot be removed: {type(e).__name__}"
            ) from e

    def provision(self, p: dict) -> dict:
        spec = p["spec"]
        return self._make(p, "provision", lambda: self.extension.provision(Profile(spec.get("profile") or {}), dict(spec.get("inputs") or {}), p["host"]))

    def wait_ready(self, p: dict) -> dict:
        h = p["handle"]
        entry = self.journal.peek(of_sandbox(h["sandbox_id"])) or {}
        ours = self._brought(h) is None or h["data"].get("journal") == self.journal.id
        if ours and not (entry.get("handle") and h.get("generation") in (0, None, entry.get("generation"))):
            raise errors.NotFound(f"sandbox {h['sandbox_id']} is not there")
        got = self._strings("wait_ready", self.extension.wait_ready(self._known(h)))
        self._same("wait_ready", got, h["sandbox_id"])
        out: dict[str, Any] = {}
        extra = {}
        for key, value in got.items():
            if key in ("ssh", "remote_dir", "host", "compose_project", "url"):
                out[key] = value
            elif key != "sandbox_id":
                extra[key] = value
        if entry.get("changed"):
            extra.setdefault("changed", entry["changed"])
        if extra:
            out["extra"] = extra
        return out

    def teardown(self, p: dict) -> dict:
        h = p["handle"]
        with self.journal.locked(of_sandbox(h["sandbox_id"])) as record:
            entry = record.read()
            generation = h.get("generation") or 0
            if entry and generation and (entry.get("generation") or 0) > generation:
                return {}  # a newer one, which is not to be touched
            brought = self._brought(h)
            handle = self._recorded(h, entry) if brought is None else brought
            complete = brought is not None or bool(entry and entry.get("handle"))
            try:
                report = self._report(self.extension.teardown(dict(handle)), h["sandbox_id"])
            except (KeyError, TypeError, AttributeError) as e:
                if complete:
                    raise
                # The class cannot do without what nobody knows any more.
                report = {"warnings": [self._remains(handle, entry, e)]}
            record.remove()
            return report

    def _remains(self, handle: dict, entry: Optional[dict], e: Exception) -> str:
        what = "its provision did not come to its end" if entry else "nothing is known of it here"
        why = f"KeyError: {e}" if isinstance(e, KeyError) else type(e).__name__  # a key is no secret; other texts may be
        return f"{what}, and {self.name}.teardown needs more than sandbox_id and host ({why}): what it may have made remains on {handle['host']}"

    def _report(self, value: Any, id: str) -> dict:
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise BadAnswer(f"{self.name}.teardown returned {type(value).__name__}, and no dict")
        self._same("teardown", value, id)
        out: dict[str, list[str]] = {}
        for key, x in value.items():
            if not isinstance(key, str):
                raise BadAnswer(f"{self.name}.teardown returned the key {key!r}, which is no string")
            lines = x if isinstance(x, (list, tuple)) and key in ("removed", "kept", "warnings") else [x]
            for line in lines:
                if not isinstance(line, str):
                    raise BadAnswer(f"{self.name}.teardown returned a {type(line).__name__} under {key!r}: every value has to be a string")
                if key in ("removed", "kept", "warnings"):
                    if line:
                        out.setdefault(key, []).append(line)
                elif key != "sandbox_id":
                    out.setdefault("removed", []).append(f"{key}: {line}")
        return out

    # Money.

    def estimate_cost(self, p: dict) -> dict:
        spec, seconds = p["spec"], p["duration_ms"] / 1000
        whole = int(seconds) if seconds == int(seconds) else seconds
        f = self.extension.estimate_cost
        profile, inputs = Profile(spec.get("profile") or {}), dict(spec.get("inputs") or {})
        quote = self._estimate(f, profile, inputs, whole)
        if quote is None:
            return {"quote": None}
        if not isinstance(quote, MeterQuote):
            quote = MeterQuote(dict(quote)) if isinstance(quote, dict) else MeterQuote(amount=quote)
        out: dict[str, Any] = {"duration_ns": p["duration_ms"] * 1_000_000}
        for name in ("amount", "setup", "per_hour"):
            if quote.get(name) is not None:
                out[name] = self._usd(quote[name], "estimate_cost", name)
        # The broker charges by the rates: a price without one is its own rate.
        ms, setup = p["duration_ms"], out.get("setup", 0)
        if "amount" not in out:
            out["amount"] = setup + half_even(Decimal(out.get("per_hour", 0)) * ms / 3_600_000)
        if out["amount"] < setup:
            raise BadAnswer(f"{self.name}.estimate_cost: amount is less than setup, which is part of it")
        if "per_hour" not in out and ms > 0:
            out["per_hour"] = min(half_even(Decimal(out["amount"] - setup) * 3_600_000 / ms), 2**63 - 1)
        if quote.get("detail"):
            out["detail"] = str(quote["detail"])
        return {"quote": out}

    @staticmethod
    def _estimate(f: Callable, profile: Profile, inputs: dict, seconds: Any) -> Any:
        """Call f by the base class's signature, (profile, inputs, *, duration_s), or the guide's, (profile, duration)."""
        try:
            parameters = inspect.signature(f).parameters
        except (TypeError, ValueError):
            return f(profile, inputs, duration_s=seconds)
        by_name = any(x.kind is x.VAR_KEYWORD for x in parameters.values())
        if "duration_s" in parameters or by_name:
            return f(profile, inputs, duration_s=seconds)
        positional = [x for x in parameters.values() if x.kind in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD)]
        if len(positional) >= 3:
            return f(profile, inputs, seconds)
        return f(profile, seconds)

    def _usd(self, value: Any, method: str, what: str) -> int:
        try:
            return micros(value, f"{self.name}.{method}: {what}")
        except ValueError as e:
            raise BadAnswer(str(e)) from None

    def meter_actual(self, p: dict) -> dict:
        h = p["handle"]
        entry = self.journal.peek(of_sandbox(h["sandbox_id"]))
        if self._brought(h) is None and entry is None:
            raise errors.NotFound(f"sandbox {h['sandbox_id']} is not there")
        # The journal has no record of what was torn down, as far as the sandbox is of this journal.
        own = (h.get("data") or {}).get("journal") == self.journal.id
        ended = own and (entry is None or entry.get("generation") != (h.get("generation") or entry.get("generation")))
        cost = self.extension.meter_actual(self._known(h), duration_s=p["duration_ms"] / 1000)
        if cost is None and ended:
            raise errors.NotFound(f"{self.name}.meter_actual does not know what sandbox {h['sandbox_id']} cost")
        now = datetime.datetime.now(datetime.timezone.utc).isoformat()
        return {"at": now, "cost": 0 if cost is None else self._usd(cost, "meter_actual", "the result"), "final": ended}

    # Snapshots.

    def snapshot(self, p: dict) -> dict:
        id = p["id"]
        with self.journal.locked(of_snapshot(id)) as record:
            entry = record.read()
            if entry and entry.get("meta"):
                return self._saved(id, entry["meta"])
            h = p["handle"]
            intent = {"snapshot": id, "sandbox_id": h["sandbox_id"], "generation": h.get("generation") or 0}
            record.write(intent)
            try:
                saved = self.extension.snapshot(self._known(h))
            except (errors.SandboxError, NotImplementedError) as e:
                if not isinstance(e, errors.SandboxError) or isinstance(e, errors.NotFound) or e.untouched:
                    record.remove()  # nothing was saved
                raise
            meta = self._strings("snapshot", saved, ["snapshot_id"])
            record.write({**intent, "meta": meta})
            return self._saved(id, meta)

    def _saved(self, id: str, meta: dict[str, str]) -> dict:
        """Return a receipt. It names the journal, by which one that was dropped is known."""
        return {"snapshot_id": id, "meta": {**meta, OF_JOURNAL: self.journal.id}}

    def _meta(self, s: dict, entry: Optional[dict]) -> Optional[dict[str, str]]:
        """Return the class's metadata of a snapshot; None if it is not there."""
        meta = dict(s.get("meta") or {})
        if meta.pop(OF_JOURNAL, "") == self.journal.id and entry is None:
            return None  # it was dropped
        return meta or (entry or {}).get("meta")

    def restore_from_snapshot(self, p: dict) -> dict:
        spec, s = p["spec"], p["snapshot"]
        with self.journal.locked(of_snapshot(s["snapshot_id"])) as record:
            entry = record.read()
        meta = self._meta(s, entry)
        if not meta:
            raise errors.NotFound(f"snapshot {s['snapshot_id']} is not there")
        return self._make(
            p, "restore_from_snapshot",
            lambda: self.extension.restore_from_snapshot(Profile(spec.get("profile") or {}), dict(meta), dict(spec.get("inputs") or {}), p["host"]),
        )

    def drop_snapshot(self, p: dict) -> dict:
        s = p["snapshot"]
        with self.journal.locked(of_snapshot(s["snapshot_id"])) as record:
            entry = record.read()
            meta = self._meta(s, entry)
            if entry and not entry.get("meta") and not meta:  # it was cut short
                meta = {"snapshot_id": s["snapshot_id"]}
            if meta and hasattr(self.extension, "drop_snapshot"):
                self.extension.drop_snapshot(dict(meta))
            record.remove()
        return {}

    def list_snapshots(self, p: dict) -> Iterable[dict]:
        for entry in self.journal.all():
            if "snapshot" not in entry or p["owner"] not in ("", self.owner):
                continue
            found: dict[str, Any] = {"snapshot": {"snapshot_id": entry["snapshot"]}, "sandbox_id": entry["sandbox_id"], "generation": entry["generation"]}
            if entry.get("meta"):
                found["snapshot"] = self._saved(entry["snapshot"], entry["meta"])
                found["whole"] = True
            yield found

    # What a class may have besides.

    def check(self, p: dict) -> dict:
        spec = p["spec"]
        self._refuse(p)
        if not hasattr(self.extension, "check"):
            return {}
        self.extension.check(Profile(spec.get("profile") or {}), dict(spec.get("inputs") or {}), p["host"])
        return {}

    def notices(self, p: dict) -> dict:
        return {"notices": [str(x) for x in itertools.islice(self.extension.notices(), MAX_NOTICES)]}

    def is_alive(self, p: dict) -> dict:
        h = p["handle"]
        now = (self.journal.peek(of_sandbox(h["sandbox_id"])) or {}).get("generation")
        if now and h.get("generation") and now != h["generation"]:
            return {"liveness": "gone"}  # it is another one
        try:
            said = self.extension.is_alive(self._known(h))
        except errors.NotFound:
            said = False
        known = {True: "alive", False: "gone", None: "unknown"}
        liveness = said if isinstance(said, str) else known.get(said)
        if liveness not in ("alive", "gone", "unknown", "unresponsive", "oom_killed"):
            raise BadAnswer(f"{self.name}.is_alive returned {said!r:.60}: want True, False, None or a liveness")
        return {"liveness": liveness}

    def discover(self, p: dict) -> dict:
        found = self.extension.discover(p["id"])
        if found is None:
            raise errors.NotFound(f"sandbox {p['id']} is not there")
        handle = self._handle("discover", found, p["id"])
        out = {"handle": self._seen(handle)}
        entry = self.journal.peek(of_sandbox(p["id"])) or {}
        if entry.get("fuse") and hasattr(self.extension, "renew"):  # a class that cannot move it may not heed it
            out["fuse"] = entry["fuse"]
        return out

    def list_running(self, p: dict) -> Iterable[dict]:
        if p["owner"] not in ("", self.owner):
            return
        for found in self.extension.list_running():
            handle = self._strings("list_running", found, ["sandbox_id", "host"])
            yield self._seen(handle)

    def notify(self, p: dict) -> Callable[[protocol.Stream], None]:
        canceled = current().canceled
        told = self.extension.notify() if p["owner"] in ("", self.owner) else None

        def go_on(stream: protocol.Stream) -> None:
            if told is None:
                canceled.wait()
                return
            for id in told:
                if not isinstance(id, str):
                    raise BadAnswer(f"{self.name}.notify told a {type(id).__name__}, and no ID")
                stream.send(protocol.OUT, protocol.encode({"sandbox_id": id}))
            if not canceled.is_set():
                raise errors.Unavailable(f"{self.name} tells nothing more")

        return go_on

    def pause(self, p: dict) -> dict:
        self.extension.pause(self._known(p["handle"]))
        return {}

    def resume(self, p: dict) -> dict:
        self.extension.resume(self._known(p["handle"]))
        return {}

    def renew(self, p: dict) -> dict:
        h = p["handle"]
        with self.journal.locked(of_sandbox(h["sandbox_id"])) as record:
            self.extension.renew(self._known(h), moment(p["until"]))
            entry = record.read()
            if entry and h.get("generation") in (0, None, entry.get("generation")):
                record.write({**entry, "fuse": p["until"]})
        return {}

    def capacity(self, p: dict) -> dict:
        room = self.extension.capacity(p.get("host") or "")
        if isinstance(room, dict):
            return {"free": int(room.get("free", -1)), "hosts": [str(h) for h in room.get("hosts", [])], "attrs": {str(k): str(v) for k, v in (room.get("attrs") or {}).items()}}
        return {"free": -1 if room is None else int(room)}

    def stats(self, p: dict) -> dict:
        got = self.extension.stats(self._known(p["handle"]))
        if not isinstance(got, dict):
            raise BadAnswer(f"{self.name}.stats returned {type(got).__name__}, and no dict")
        out: dict[str, Any] = {"at": datetime.datetime.now(datetime.timezone.utc).isoformat(), "cpu_ns": int(float(got.get("cpu_s", -1)) * 1e9) if "cpu_s" in got else -1}
        for name in ("memory_bytes", "disk_bytes", "pids", "rx_bytes", "tx_bytes"):
            out[name] = int(got.get(name, -1))
        for name in ("memory_limit", "disk_limit"):
            if got.get(name):
                out[name] = int(got[name])
        return out

    def expose(self, p: dict) -> dict:
        found = self.extension.expose(self._known(p["handle"]), p["port"])
        if isinstance(found, str):
            return {"url": found}
        return {"url": str(found["url"]), "header": {k: [str(v)] for k, v in (found.get("header") or {}).items()}}

    def exec(self, p: dict, stream: protocol.Stream) -> dict:
        handle = self._known(p["handle"])
        command.serve(stream, p, current().canceled, lambda c: self.extension.exec(handle, c))
        return {}

    def write_file(self, p: dict, stream: protocol.Stream) -> dict:
        source = protocol.io.BufferedReader(protocol.DataReader(stream))
        self.extension.write_file(self._known(p["handle"]), protocol.text(p["path"]), source, p.get("mode", 0) & 0o777)
        return {}

    def stat_file(self, p: dict) -> dict:
        return self._file("stat_file", self.extension.stat_file(self._known(p["handle"]), protocol.text(p["path"])))

    def _file(self, method: str, value: Any) -> dict:
        if not isinstance(value, dict) or "path" not in value:
            raise BadAnswer(f"{self.name}.{method} returned no dict with a 'path'")
        when = value.get("mod_time", 0)
        if isinstance(when, (int, float)):
            when = datetime.datetime.fromtimestamp(when, datetime.timezone.utc).isoformat()
        elif isinstance(when, datetime.datetime):
            when = when.astimezone(datetime.timezone.utc).isoformat()
        out = {"path": protocol.travel(value["path"]), "size": int(value.get("size", 0)), "mode": go_mode(int(value.get("mode", 0))), "mod_time": when}
        for name in ("owner", "group"):
            if value.get(name):
                out[name] = str(value[name])
        if value.get("target"):
            out["target"] = protocol.travel(value["target"])
        return out

    def make_dir(self, p: dict) -> dict:
        self.extension.make_dir(self._known(p["handle"]), protocol.text(p["dir"]))
        return {}

    def move_file(self, p: dict) -> dict:
        self.extension.move_file(self._known(p["handle"]), protocol.text(p["from"]), protocol.text(p["to"]))
        return {}

    def remove_file(self, p: dict) -> dict:
        self.extension.remove_file(self._known(p["handle"]), protocol.text(p["path"]))
        return {}

    def archive(self, p: dict, stream: protocol.Stream) -> dict:
        self.extension.archive(self._known(p["handle"]), protocol.text(p.get("dir") or ""), protocol.DataWriter(stream, protocol.OUT))
        stream.send(protocol.END)
        return {}

    def unarchive(self, p: dict, stream: protocol.Stream) -> dict:
        self.extension.unarchive(self._known(p["handle"]), protocol.text(p.get("dir") or ""), protocol.io.BufferedReader(protocol.DataReader(stream)))
        return {}

    # What answers when its stream has begun: each returns what goes on afterwards.

    def read_file(self, p: dict) -> Callable[[protocol.Stream], None]:
        source = self.extension.read_file(self._known(p["handle"]), protocol.text(p["path"]))
        if isinstance(source, (bytes, bytearray)):
            source = protocol.io.BytesIO(source)

        def go_on(stream: protocol.Stream) -> None:
            with source:
                while True:
                    data = source.read(protocol.MAX_DATA)
                    if not data:
                        return
                    stream.send_data(protocol.OUT, data)

        return go_on

    def list_files(self, p: dict) -> Callable[[protocol.Stream], None]:
        handle, dir = self._known(p["handle"]), protocol.text(p["dir"])
        first = self.extension.list_files(handle, dir)

        def go_on(stream: protocol.Stream) -> None:
            # In the order of names, of which a class need not know. What is more than can be held it is asked for again.
            after, found = os.fsencode(protocol.text(p.get("after") or "")), first
            while True:
                page, more = self._page(found, after)
                for _, line in page:
                    stream.send(protocol.OUT, line)
                if not more:
                    return
                after, found = page[-1][0], self.extension.list_files(handle, dir)

        return go_on

    def _page(self, found: Iterable[dict], after: bytes) -> tuple[list[tuple[bytes, bytes]], bool]:
        """Return the first files after a name, in the order of names and as they travel, and whether there are more."""
        page: list[tuple[bytes, bytes]] = []
        held, last = 0, None  # last is the name that is the last of the page when there are more

        def cut() -> None:
            nonlocal held, last
            page.sort()
            held = 0
            for at, (name, line) in enumerate(page):
                held += len(name) + len(line)
                if held > MAX_HELD and at > 0:
                    held -= len(name) + len(line)
                    del page[at:]
                    last = page[-1][0]
                    return

        for count, value in enumerate(found):
            if count == MAX_LISTED:
                raise errors.Failed(f"there are more than {MAX_LISTED} files in the directory")
            out = self._file("list_files", value)
            name = os.fsencode(os.path.basename(value["path"]))
            if name <= after or last is not None and name > last:
                continue
            page.append((name, protocol.encode(out)))
            held += len(name) + len(page[-1][1])
            if held > 2 * MAX_HELD:
                cut()
        cut()
        return page, last is not None

    def dial(self, p: dict) -> Callable[[protocol.Stream], None]:
        conn = self.extension.dial(self._known(p["handle"]), p["port"])
        conn.settimeout(None)  # that of connecting is not that of the connection

        def go_on(stream: protocol.Stream) -> None:
            import socket
            import threading

            def inwards() -> None:
                source = protocol.DataReader(stream)
                try:
                    while True:
                        data = source.read(protocol.MAX_DATA)
                        if not data:
                            conn.shutdown(socket.SHUT_WR)
                            return
                        conn.sendall(data)
                except OSError:
                    try:
                        conn.shutdown(socket.SHUT_RDWR)
                    except OSError:
                        pass

            thread = threading.Thread(target=inwards, daemon=True)
            thread.start()
            try:
                while True:
                    data = conn.recv(protocol.MAX_DATA)
                    if not data:
                        break
                    stream.send_data(protocol.OUT, data)
                stream.send(protocol.END)
                thread.join()
            finally:
                conn.close()

        return go_on


# The methods by how they use a stream.
ALONG = {"exec", "write_file", "archive", "unarchive"}
BEGUN = {"read_file", "list_files", "dial", "notify"}
LISTS = {"list_running", "list_snapshots"}

# Calls of one sandbox that come one after the other.
IN_TURN = {"provision", "wait_ready", "teardown", "snapshot", "restore_from_snapshot", "drop_snapshot", "pause", "resume", "renew"}

_GO_TYPES = {stat.S_IFDIR: 1 << 31, stat.S_IFLNK: 1 << 27, stat.S_IFIFO: 1 << 25, stat.S_IFSOCK: 1 << 24, stat.S_IFBLK: 1 << 26, stat.S_IFCHR: 1 << 26 | 1 << 21}


def half_even(x: Decimal) -> int:
    return int(x.to_integral_value(rounding=ROUND_HALF_EVEN))


def go_mode(mode: int) -> int:
    """Return a mode of os.stat as Go's io/fs.FileMode."""
    out = mode & 0o777 | _GO_TYPES.get(stat.S_IFMT(mode), 0)
    for bit, go in ((stat.S_ISUID, 1 << 23), (stat.S_ISGID, 1 << 22), (stat.S_ISVTX, 1 << 20)):
        if mode & bit:
            out |= go
    return out


def moment(text: str) -> datetime.datetime:
    """Read a time as RFC 3339 writes it."""
    if text.endswith("Z"):
        text = text[:-1] + "+00:00"
    head, dot, rest = text.partition(".")
    if dot:  # Python keeps microseconds
        digits = len(rest) - len(rest.lstrip("0123456789"))
        text = head + "." + rest[:digits][:6].ljust(6, "0") + rest[digits:]
    return datetime.datetime.fromisoformat(text)


def request_of(method: str, params: dict, owner: str, **more: Any) -> Request:
    """Return the Request of a call."""
    spec = params.get("spec") or {}
    h = params.get("handle") or {}
    return Request(
        method=method,
        id=spec.get("id") or h.get("sandbox_id") or "",
        generation=spec.get("generation") or h.get("generation") or 0,
        owner=owner,
        env={k: protocol.text(v) for k, v in (params.get("env") or {}).items()},
        spec=spec,
        fuse=moment(spec["fuse"]) if spec.get("fuse") else None,
        snapshot_id=params["id"] if method == "snapshot" else (params.get("snapshot") or {}).get("snapshot_id") or "",
        **more,
    )
