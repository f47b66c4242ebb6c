import os
import socket
import tempfile
import unittest
from unittest.mock import patch

from sandboxer import adapt, errors, host, protocol
from sandboxer.extensions.base import SandboxExtension
from sandboxer.journal import Journal
from sandboxer.models import MeterQuote
from sandboxer.testing import SSHConfig, answering


class Recorder(SandboxExtension):
    """Remembers its calls, and answers what it is told to."""

    def __init__(self, config=None):
        super().__init__(config)
        self.calls = []
        self.handle = None
        self.ready = {}
        self.report = {}
        self.fails = {}

    def _call(self, *call):
        self.calls.append(call)
        if call[0] in self.fails:
            raise self.fails[call[0]]

    def provision(self, profile, inputs, host):
        self._call("provision", inputs["sandbox_id"], host)
        return self.handle or {"sandbox_id": inputs["sandbox_id"], "host": host, "vm": "7"}

    def wait_ready(self, handle):
        self._call("wait_ready", handle)
        return self.ready

    def teardown(self, handle):
        self._call("teardown", handle)
        return self.report


def spec(id="one", generation=1, **more):
    return {"spec": {"id": id, "generation": generation, "inputs": {"sandbox_id": id}, "profile": {"id": "profile.x"}, **more}, "host": "h1"}


class Case(unittest.TestCase):
    def setUp(self):
        self.dir = tempfile.TemporaryDirectory()
        self.addCleanup(self.dir.cleanup)
        self.e = Recorder()

    def adapted(self, extension=None):
        return adapt.Adapted(extension or self.e, Journal(os.path.join(self.dir.name, "journal")), "owner")

    def names(self):
        return [c[0] for c in self.e.calls]


class TestLife(Case):
    def test_a_repeat_makes_nothing(self):
        a = self.adapted()
        first = a.provision(spec())
        self.assertEqual(first, self.adapted().provision(spec()))
        self.assertEqual(self.names(), ["provision"])
        self.assertEqual((first["sandbox_id"], first["generation"], first["host"]), ("one", 1, "h1"))

    def test_an_interrupted_provision_is_cleared(self):
        self.e.fails["provision"] = KeyboardInterrupt()
        with self.assertRaises(KeyboardInterrupt):
            self.adapted().provision(spec())
        self.e.fails.clear()
        self.adapted().provision(spec())
        self.assertEqual(self.e.calls[1], ("teardown", {"sandbox_id": "one", "host": "h1"}))
        self.assertEqual(self.names(), ["provision", "teardown", "provision"])

    def test_what_cannot_be_cleared_is_said(self):
        self.e.fails["provision"] = OSError("gone")
        with self.assertRaises(OSError):
            self.adapted().provision(spec())
        self.e.fails = {"teardown": OSError("still gone")}
        with self.assertRaisesRegex(errors.Unavailable, "what it may have left on h1 cannot be removed"):
            self.adapted().provision(spec())

    def test_teardown_by_the_id_alone(self):
        a = self.adapted()
        a.provision(spec())
        a.teardown({"handle": {"sandbox_id": "one"}})
        self.assertEqual(self.e.calls[-1], ("teardown", {"sandbox_id": "one", "host": "h1", "vm": "7"}))
        with self.assertRaises(errors.NotFound):
            a.wait_ready({"handle": {"sandbox_id": "one"}})

    def test_a_late_teardown_spares_the_newer(self):
        a = self.adapted()
        old = a.provision(spec(generation=1))
        a.teardown({"handle": old})
        a.provision(spec(generation=2))
        self.e.calls.clear()
        self.assertEqual(a.teardown({"handle": old}), {})
        self.assertEqual(self.names(), [])
        with self.assertRaises(errors.Conflict):
            a.provision(spec(generation=1))

    def test_the_journal_is_lost(self):
        h = self.adapted().provision(spec())
        other = adapt.Adapted(self.e, Journal(os.path.join(self.dir.name, "other")), "owner")
        other.wait_ready({"handle": h})  # it may be there
        other.teardown({"handle": h})
        self.assertEqual(self.e.calls[-1][1]["vm"], "7")
        other.teardown({"handle": {"sandbox_id": "one", "host": "h9"}})
        self.assertEqual(self.e.calls[-1], ("teardown", {"sandbox_id": "one", "host": "h9"}))

    def test_a_class_that_needs_more_than_the_id(self):
        self.e.fails["teardown"] = KeyError("vm")
        report = self.adapted().teardown({"handle": {"sandbox_id": "one", "host": "h1"}})
        self.assertIn("remains on h1", report["warnings"][0])
        h = {"sandbox_id": "one", "host": "h1", "data": {"handle": {"sandbox_id": "one", "host": "h1"}}}
        with self.assertRaises(KeyError):  # it had all there was
            self.adapted().teardown({"handle": h})

    def test_ids_that_are_like_other_records(self):
        self.e.supports_snapshots = lambda: True
        self.e.snapshot = lambda handle: {"snapshot_id": "own"}
        a = self.adapted()
        for id in ("journal", "id", "snapshot-s1", "s1"):
            h = a.provision(spec(id=id))
            a.snapshot({"handle": h, "id": "s1"})
            self.assertEqual(self.adapted().provision(spec(id=id)), h)
            a.teardown({"handle": h})
        self.assertEqual(self.names(), ["provision", "teardown"] * 4)
        self.assertEqual(a.journal.id, self.adapted().journal.id)
        self.assertEqual([f["snapshot"]["snapshot_id"] for f in a.list_snapshots({"owner": "owner"})], ["s1"])

    def test_what_is_asked_beyond_the_profile(self):
        with self.assertRaisesRegex(errors.Unsupported, "Recorder does not support image, limits.pids of a request"):
            self.adapted().provision(spec(image="x", limits={"pids": 3}))
        self.adapted().provision(spec(image="x", profile={"image": "x"}))
        self.e.accepts = ["image", "limits.pids"]
        self.adapted().provision(spec(id="two", image="y", limits={"pids": 3}))
        self.assertEqual(self.names(), ["provision", "provision"])


class TestAnswers(Case):
    def fails(self, text, do):
        with self.assertRaises(adapt.BadAnswer) as raised:
            do()
        self.assertIn(text, str(raised.exception))

    def test_handles(self):
        for handle, text in [
            ({"sandbox_id": "one"}, "Recorder.provision returned no 'host'"),
            ({"host": "h"}, "Recorder.provision returned no 'sandbox_id'"),
            ({"sandbox_id": "two", "host": "h"}, "returned the handle of 'two' under 'sandbox_id'"),
            ({"sandbox_id": "one", "host": "h", "port": 22}, "Recorder.provision returned a int under 'port'"),
            ([1], "Recorder.provision returned list"),
        ]:
            self.e.handle = handle
            self.fails(text, lambda: self.adapted().provision(spec()))

    def test_reachability(self):
        h = self.adapted().provision(spec())
        self.e.ready = {"ssh": "u@h", "remote_dir": "/w", "host": "h", "compose_project": "p", "url": "http://x", "color": "red", "sandbox_id": "one"}
        self.assertEqual(
            self.adapted().wait_ready({"handle": h}),
            {"ssh": "u@h", "remote_dir": "/w", "host": "h", "compose_project": "p", "url": "http://x", "extra": {"color": "red"}},
        )
        self.e.ready = {"ssh": None}
        self.fails("Recorder.wait_ready returned a NoneType under 'ssh'", lambda: self.adapted().wait_ready({"handle": h}))

    def test_reports(self):
        self.e.report = {"removed": ["a", "b"], "kept": "the machine", "warnings": "look", "compose": "down", "sandbox_id": "one"}
        self.assertEqual(
            self.adapted().teardown({"handle": {"sandbox_id": "one"}}),
            {"removed": ["a", "b", "compose: down"], "kept": ["the machine"], "warnings": ["look"]},
        )
        self.e.report = None
        self.assertEqual(self.adapted().teardown({"handle": {"sandbox_id": "one"}}), {})

    def test_errors_travel(self):
        for e, method, want in [
            (errors.Exhausted("full", hint="wait", retry_after=2), "provision", {"kind": "exhausted", "message": "full", "hint": "wait", "retry_after_ms": 2000}),
            (NotImplementedError("X does not support snapshots"), "snapshot", {"kind": "unsupported", "message": "X does not support snapshots"}),
            (ValueError("repo is no\nurl"), "provision", {"kind": "invalid", "message": "repo is no url"}),
            (KeyError("repo"), "provision", {"kind": "invalid", "message": "'repo' is missing"}),
            (KeyError("repo"), "teardown", {"kind": "internal", "message": "X.teardown failed: KeyError"}),
            (RuntimeError("the password is hush"), "provision", {"kind": "internal", "message": "X.provision failed: RuntimeError"}),
        ]:
            got = host.error_of(e, method, "X")
            if want["kind"] == "internal":
                self.assertIn(type(e).__name__, got.pop("trace"))
                self.assertEqual(got.pop("public"), want["message"])
            self.assertEqual(got, want)

    def test_traces_are_bounded(self):
        """The end of a traceback travels, without half a word."""
        try:
            raise RuntimeError("password=correct-horse " + "word " * 798 + "end")
        except RuntimeError as e:
            trace = host.error_of(e, "exec", "X")["trace"]
        self.assertLessEqual(len(trace), 4000)
        self.assertTrue(trace.startswith("…"), trace[:40])
        self.assertTrue(trace.rstrip().endswith("end"), trace[-20:])
        self.assertEqual(host.trace_of(RuntimeError("x" * 5000)), "…")

    def test_long_errors_are_cut_between_words(self):
        """The broker blanks out secrets, and would not know half of one."""
        message = host.error_of(errors.Failed("word " * 397 + "password=correct-horse " + "word " * 100), "provision", "X")["message"]
        self.assertTrue(message.endswith(" word…"), message[-30:])

    def test_another_sandbox(self):
        h = self.adapted().provision(spec())
        self.e.ready = {"sandbox_id": "two"}
        self.fails("Recorder.wait_ready returned the handle of 'two' under 'sandbox_id'", lambda: self.adapted().wait_ready({"handle": h}))
        self.e.report = {"sandbox_id": "two"}
        self.fails("Recorder.teardown returned the handle of 'two' under 'sandbox_id'", lambda: self.adapted().teardown({"handle": h}))

    def test_what_is_no_text(self):
        self.e.handle = {"sandbox_id": "one", "host": "h", "dir": "/\udcff"}
        self.fails("Recorder.provision returned under 'dir' what is no UTF-8", lambda: self.adapted().provision(spec()))

    def test_found_after_the_journal_was_lost(self):
        """What the class finds by itself is there, whatever the journal does not know."""

        class Finds(Recorder):
            def discover(self, sandbox_id):
                return {"sandbox_id": sandbox_id, "host": "h1"}

            def list_running(self):
                return [self.discover("one")]

            def is_alive(self, handle):
                raise errors.NotFound("gone")

        a = self.adapted(Finds())
        a.wait_ready({"handle": a.discover({"id": "one"})["handle"]})
        a.wait_ready({"handle": next(iter(a.list_running({"owner": "owner"})))})
        self.assertEqual(a.is_alive({"handle": {"sandbox_id": "one"}}), {"liveness": "gone"})


class TestFiles(Case):
    def listed(self, names, after="", **bounds):
        """Return what is sent of a directory of names, and how often the class was asked."""

        class Lists(Recorder):
            def list_files(self, handle, dir):
                self._call("list_files", dir)
                for name in names:
                    yield {"path": os.path.join(dir, name)}

        class Stream:
            def send(self, channel, payload):
                sent.append(protocol.decode(payload)["path"])

        sent = []
        self.e = Lists()
        with patch.multiple(adapt, **{"MAX_LISTED": adapt.MAX_LISTED, **bounds}):
            self.adapted().list_files({"handle": {"sandbox_id": "one"}, "dir": "/d", "after": after})(Stream())
        return [os.path.basename(protocol.text(s)) for s in sent], len(self.e.calls)

    def test_in_the_order_of_names(self):
        names = ["b", "a", "\udcff", "B", "é"]
        self.assertEqual(self.listed(names), (["B", "a", "b", "é", "\udcff"], 1))
        self.assertEqual(self.listed(names, after="a"), (["b", "é", "\udcff"], 1))

    def test_what_is_held_of_a_directory_is_bounded(self):
        names = [f"{n * 7919 % 2000:04}" for n in range(2000)]
        most = 0
        page = adapt.Adapted._page

        def measured(self, found, after):
            nonlocal most
            got = page(self, found, after)
            most = max(most, sum(len(name) + len(line) for name, line in got[0]))
            return got

        with patch.object(adapt.Adapted, "_page", measured):
            got, asked = self.listed(names, MAX_HELD=40_000)
        self.assertEqual(got, sorted(names))
        self.assertGreater(asked, 2)
        self.assertLessEqual(most, 40_000)
        self.assertEqual(self.listed(names[:50], MAX_HELD=1)[0], sorted(names[:50]))  # one at least is held

    def test_a_directory_without_end(self):
        import itertools

        with self.assertRaisesRegex(errors.Failed, "more than 1000 files"):
            self.listed(map(str, itertools.count()), MAX_LISTED=1000)

    def test_the_timeout_of_connecting_ends_with_it(self):
        here, there = socket.socketpair()
        self.addCleanup(here.close)
        self.addCleanup(there.close)
        here.settimeout(0.1)
        self.e.dial = lambda handle, port: here
        self.adapted().dial({"handle": {"sandbox_id": "one"}, "port": 80})
        self.assertIsNone(here.gettimeout())


class TestNotify(Case):
    def sent(self, told, canceled=False, owner="owner"):
        self.e.notify = lambda: iter(told)
        out = []

        class Stream:
            def send(self, channel, payload):
                out.append(protocol.decode(payload))

        with answering() as call:
            go_on = self.adapted().notify({"owner": owner})
            if canceled:
                call.canceled.set()
            go_on(Stream())
        return out

    def test_who_is_told_what(self):
        self.assertEqual(self.sent(["a", "b"], canceled=True), [{"sandbox_id": "a"}, {"sandbox_id": "b"}])
        self.assertEqual(self.sent(["a"], canceled=True, owner="other"), [])

    def test_an_end_that_was_not_asked_for(self):
        with self.assertRaises(errors.Unavailable):
            self.sent(["a"])
        with self.assertRaisesRegex(adapt.BadAnswer, "Recorder.notify told a int, and no ID"):
            self.sent([7])


class TestFuse(Case):
    def test_it_is_known_and_moved(self):
        class Renews(Recorder):
            def discover(self, sandbox_id):
                return {"sandbox_id": sandbox_id, "host": "h1"}

            def renew(self, handle, until):
                self._call("renew", until)

        self.e = Renews()
        a = self.adapted()
        h = a.provision(spec(fuse="2026-01-02T03:04:05Z"))
        self.assertEqual(a.discover({"id": "one"})["fuse"], "2026-01-02T03:04:05Z")
        a.renew({"handle": h, "until": "2026-01-02T04:04:05.123456789+00:00"})
        self.assertEqual(self.e.calls[-1][1].isoformat(), "2026-01-02T04:04:05.123456+00:00")
        self.assertEqual(self.adapted().discover({"id": "one"})["fuse"], "2026-01-02T04:04:05.123456789+00:00")
        r = adapt.request_of("provision", spec(fuse="2026-01-02T03:04:05Z"), "owner")
        self.assertEqual(r.fuse.isoformat(), "2026-01-02T03:04:05+00:00")
        self.assertIsNone(adapt.request_of("provision", spec(), "owner").fuse)

    def test_who_cannot_move_it_does_not_tell_it(self):
        self.e.discover = lambda sandbox_id: {"sandbox_id": sandbox_id, "host": "h1"}
        a = self.adapted()
        a.provision(spec(fuse="2026-01-02T03:04:05Z"))
        self.assertNotIn("fuse", a.discover({"id": "one"}))


class TestMoney(Case):
    def test_both_signatures(self):
        class Base(Recorder):
            def estimate_cost(self, profile, inputs, *, duration_s=3600):
                return MeterQuote(amount=0.1 * duration_s / 3600, detail=f"{profile.id} {inputs['sandbox_id']} {duration_s}")

        class Guide(Recorder):
            def estimate_cost(self, profile, duration):
                return 0.25 if (profile.id, duration) == ("profile.x", 1800) else None

        p = {**spec(), "duration_ms": 1_800_000}
        self.assertEqual(self.adapted(Base()).estimate_cost(p)["quote"], {"duration_ns": 1_800_000_000_000, "amount": 50_000, "per_hour": 100_000, "detail": "profile.x one 1800"})
        self.assertEqual(self.adapted(Guide()).estimate_cost(p)["quote"]["amount"], 250_000)
        self.assertEqual(self.adapted(Guide()).estimate_cost({**p, "duration_ms": 5})["quote"], None)

    def test_meter(self):
        class Meter(Recorder):
            def meter_actual(self, handle, *, duration_s):
                return {"7": 0.3, "8": float("nan"), "9": -1.0}[handle["vm"]] * (duration_s / 10)

        a = self.adapted(Meter())
        h = {"sandbox_id": "one", "data": {"handle": {"sandbox_id": "one", "host": "h", "vm": "7"}}}
        self.assertEqual(a.meter_actual({"handle": h, "duration_ms": 10_000})["cost"], 300_000)  # its sandbox is long gone
        for vm in "89":
            h["data"]["handle"]["vm"] = vm
            with self.assertRaisesRegex(adapt.BadAnswer, "Meter.meter_actual: the result is"):
                a.meter_actual({"handle": h, "duration_ms": 10_000})

    def test_meter_of_the_ended(self):
        """Once a sandbox was torn down, a number is what it cost in the end, and None that nobody knows."""

        class Meter(Recorder):
            cost = 0.5

            def meter_actual(self, handle, *, duration_s):
                return self.cost

        e = Meter()
        a = self.adapted(e)
        h = a.provision(spec())
        p = {"handle": h, "duration_ms": 10_000}
        self.assertEqual(a.meter_actual(p)["final"], False)
        e.cost = None
        self.assertEqual((a.meter_actual(p)["cost"], a.meter_actual(p)["final"]), (0, False))
        a.teardown({"handle": h})
        with self.assertRaises(errors.NotFound):
            a.meter_actual(p)
        e.cost = 0.75
        self.assertEqual((a.meter_actual(p)["cost"], a.meter_actual(p)["final"]), (750_000, True))

    def test_rates(self):
        """What is charged follows the rates, so a quote always has them."""

        class Quotes(Recorder):
            def estimate_cost(self, profile, duration):
                return self.quote

        e = Quotes()
        p = {**spec(), "duration_ms": 7_200_000}
        for quote, want in [
            (0.5, (500_000, None, 250_000)),
            ({"amount": 1.5, "setup": 1}, (1_500_000, 1_000_000, 250_000)),
            ({"setup": 1, "per_hour": 0.000001}, (1_000_002, 1_000_000, 1)),
            ({"per_hour": 9007199254.740993}, (18_014_398_509_481_986, None, 9_007_199_254_740_993)),
        ]:
            e.quote = quote
            got = self.adapted(e).estimate_cost(p)["quote"]
            self.assertEqual((got["amount"], got.get("setup"), got["per_hour"]), want, quote)
        e.quote = {"amount": 1, "setup": 2}
        with self.assertRaisesRegex(adapt.BadAnswer, "Quotes.estimate_cost: amount is less than setup"):
            self.adapted(e).estimate_cost(p)

    def test_meter_of_the_unknown(self):
        class Meter(Recorder):
            def meter_actual(self, handle, *, duration_s):
                return float(handle["vm"])

        with self.assertRaises(errors.NotFound):
            self.adapted(Meter()).meter_actual({"handle": {"sandbox_id": "none"}, "duration_ms": 1})

    def test_offered_only_if_overridden(self):
        self.assertEqual(self.adapted().description()["capabilities"], ["check"])


class TestSnapshots(Case):
    def test_cut_short(self):
        """What nobody knows anything of is dropped by the broker's ID; what was refused was not saved."""
        self.e.supports_snapshots = lambda: True
        self.e.drop_snapshot = lambda meta: self.e.calls.append(("drop", meta))
        a = self.adapted()
        h = a.provision(spec())

        def fails(e):
            def snapshot(handle):
                raise e

            return snapshot

        for refusal in (errors.NotFound("gone"), errors.Conflict("busy", untouched=True), NotImplementedError("no")):
            self.e.snapshot = fails(refusal)
            with self.assertRaises(type(refusal)):
                a.snapshot({"handle": h, "id": "s0"})
            self.assertEqual(list(a.list_snapshots({"owner": "owner"})), [])
        self.e.snapshot = fails(OSError("cut"))
        with self.assertRaises(OSError):
            a.snapshot({"handle": h, "id": "s1"})
        found = list(a.list_snapshots({"owner": "owner"}))
        self.assertEqual([(f["snapshot"], "whole" in f) for f in found], [({"snapshot_id": "s1"}, False)])
        a.drop_snapshot(found[0])
        self.assertEqual(self.e.calls[-1], ("drop", {"snapshot_id": "s1"}))
        self.assertEqual(list(a.list_snapshots({"owner": "owner"})), [])
        self.assertEqual(adapt.request_of("snapshot", {"handle": h, "id": "s1"}, "owner").snapshot_id, "s1")

    def test_by_way_of_the_journal(self):
        class Saves(Recorder):
            def supports_snapshots(self):
                return True

            def snapshot(self, handle):
                self._call("snapshot", handle["vm"])
                return {"snapshot_id": "own-7", "at": "noon"}

            def restore_from_snapshot(self, profile, snapshot_meta, inputs, host):
                self._call("restore", snapshot_meta)
                return {"sandbox_id": inputs["sandbox_id"], "host": host}

            def drop_snapshot(self, snapshot_meta):
                self._call("drop", snapshot_meta)

        self.e = Saves()
        a = self.adapted()
        self.assertIn("snapshot", a.description()["capabilities"])
        h = a.provision(spec())
        s = a.snapshot({"handle": h, "id": "s1"})
        self.assertEqual(s, {"snapshot_id": "s1", "meta": {"snapshot_id": "own-7", "at": "noon", "sandboxer_journal": a.journal.id}})
        self.assertEqual(s, a.snapshot({"handle": h, "id": "s1"}))
        self.assertEqual(list(a.list_snapshots({"owner": "owner"})), [{"snapshot": s, "sandbox_id": "one", "generation": 1, "whole": True}])
        self.assertEqual(a.restore_from_snapshot({**spec(id="two"), "snapshot": s})["sandbox_id"], "two")
        a.drop_snapshot({"snapshot": {"snapshot_id": "s1"}})
        a.drop_snapshot({"snapshot": {"snapshot_id": "s1"}})
        a.drop_snapshot({"snapshot": s})
        self.assertEqual(self.names(), ["provision", "snapshot", "restore", "drop"])
        self.assertEqual(self.e.calls[2], ("restore", {"snapshot_id": "own-7", "at": "noon"}))
        for dropped in ({"snapshot_id": "s1"}, s):
            with self.assertRaises(errors.NotFound):
                a.restore_from_snapshot({**spec(id="three"), "snapshot": dropped})
        # Of a journal that was lost nothing is proven: the class is asked.
        other = adapt.Adapted(self.e, Journal(os.path.join(self.dir.name, "other")), "owner")
        other.restore_from_snapshot({**spec(id="four"), "snapshot": s})
        other.drop_snapshot({"snapshot": s})
        self.assertEqual(self.e.calls[-1], ("drop", {"snapshot_id": "own-7", "at": "noon"}))


class AttachExtension(SandboxExtension):
    """Goes by SSH, in the manner of the guide."""

    def provision(self, profile, inputs, host):
        ssh = SSHConfig(inputs["vm"])
        status, said = ssh.run(f"mkdir -p /build/sbx-{inputs['sandbox_id']}")
        if status != 0:
            raise errors.Unavailable(f"{inputs['vm']}: {said}")
        return {"sandbox_id": inputs["sandbox_id"], "host": host, "vm_target": inputs["vm"]}

    def wait_ready(self, handle):
        return {"ssh": handle["vm_target"]}

    def teardown(self, handle):
        return {}


class TestPattern(Case):
    """The guide's test pattern."""

    def test_patched(self):
        with patch.object(SSHConfig, "run", return_value=(0, "ready")):
            ext = AttachExtension()
            handle = ext.provision(None, {"vm": "haskell-build", "sandbox_id": "one"}, "localhost")
        self.assertEqual(handle["vm_target"], "haskell-build")
        with patch.object(SSHConfig, "run", return_value=(255, "no route")):
            with self.assertRaises(errors.Unavailable):
                ext.provision(None, {"vm": "haskell-build", "sandbox_id": "one"}, "localhost")

    def test_command_line(self):
        ssh = SSHConfig("ci@h", port=22, identity="/k")
        self.assertEqual(ssh.argv("true")[-3:], ["--", "ci@h", "true"])
        with self.assertRaises(ValueError):
            SSHConfig("-oProxyCommand=x")
