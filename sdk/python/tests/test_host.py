"""Drives host processes as the broker does."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import unittest

SDK = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

CLASS = """
    import os, sys, threading, time

    class Extension:
        accepts = ["env"]
        def __init__(self, config):
            self.config = config
            print("made")
            os.system("echo from a child")
        def provision(self, profile, inputs, host):
            print("provisioning")
            where = os.path.join(self.config["root"], inputs["sandbox_id"])
            open(where + ".begun", "w").close()
            while os.path.exists(where + ".wait"):
                time.sleep(0.01)
            return {"sandbox_id": inputs["sandbox_id"], "host": host}
        def wait_ready(self, handle):
            return {}
        def teardown(self, handle):
            with open(os.path.join(self.config["root"], "torn"), "a") as f:
                f.write(handle["sandbox_id"] + "\\n")
            return {}
        def is_alive(self, handle):
            return True
        def exec(self, handle, command):
            return command.run(command.args)
"""


class Broker:
    """One host process, and the broker's side of the protocol."""

    def __init__(self, directory, **hello):
        self.path = os.path.join(directory, f"streams{id(self)}")
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self.path)
        self.listener.listen()
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-u", os.path.join(SDK, "sandboxer", "host.py")], cwd=directory, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        self.said = []
        self.stderr = threading.Thread(target=lambda: self.said.extend(self.process.stderr), daemon=True)
        self.stderr.start()
        self.last = 0
        self.answers = {}
        self.change = threading.Condition()
        self.send({"hello": {"protocols": [1], "owner": "o", "handler": "mod:Extension", "path": [directory], "streams": self.path, "config": {"root": directory}, **hello}})
        self.hello = json.loads(self.process.stdout.readline())["hello"]
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def send(self, line):
        self.process.stdin.write(json.dumps(line).encode() + b"\n")
        self.process.stdin.flush()

    def read(self):
        for line in self.process.stdout:
            value = json.loads(line)
            with self.change:
                self.answers.setdefault(value.get("id"), []).append(value)
                self.change.notify_all()

    def ask(self, method, stream="", **params):
        self.last += 1
        self.send({"id": self.last, "method": method, "params": params, **({"stream": stream} if stream else {})})
        return self.last

    def answer(self, id, timeout=30):
        with self.change:
            self.change.wait_for(lambda: id in self.answers, timeout)
            return self.answers[id][0]

    def provision(self, id, generation=1):
        return self.ask("provision", spec={"id": id, "generation": generation, "inputs": {"sandbox_id": id}}, host="localhost")

    def close(self):
        self.listener.close()
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass
        self.process.wait(30)
        self.stderr.join(30)
        self.reader.join(30)
        self.process.stdout.close()
        self.process.stderr.close()


class TestHost(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.dir = directory.name
        self.write("mod.py", CLASS)

    def write(self, name, text=""):
        with open(os.path.join(self.dir, name), "w") as f:
            f.write(textwrap.dedent(text))

    def broker(self, **hello):
        b = Broker(self.dir, **hello)
        self.addCleanup(b.close)
        return b

    def wait(self, name):
        end = time.monotonic() + 30
        while not os.path.exists(os.path.join(self.dir, name)):
            self.assertLess(time.monotonic(), end, f"{name} does not come")
            time.sleep(0.005)

    def test_print_does_not_reach_the_protocol(self):
        b = self.broker()
        self.assertEqual(b.answer(b.provision("one"))["result"]["sandbox_id"], "one")
        b.close()
        said = b"".join(b.said).decode()
        for text in ("made", "from a child", "provisioning"):
            self.assertIn(text, said)
        self.assertEqual(b.process.returncode, 0)

    def test_versions(self):
        b = self.broker(protocols=[7, 9])
        self.assertEqual(b.hello["error"]["kind"], "unsupported")
        self.assertIn("[7, 9]", b.hello["error"]["message"])
        self.assertIn("[1]", b.hello["error"]["message"])

    def test_in_turn_and_side_by_side(self):
        b = self.broker()
        self.write("one.wait")
        first = b.provision("one")
        self.wait("one.begun")
        second = b.ask("wait_ready", handle={"sandbox_id": "one"})
        self.assertIn("result", b.answer(b.provision("two")))  # another sandbox does not wait
        self.assertEqual(b.answer(b.ask("is_alive", handle={"sandbox_id": "one"}))["result"], {"liveness": "alive"})
        self.assertNotIn(second, b.answers)
        os.unlink(os.path.join(self.dir, "one.wait"))
        self.assertIn("result", b.answer(first))
        self.assertEqual(b.answer(second)["result"], {})

    def test_canceled(self):
        b = self.broker()
        self.write("one.wait")
        first = b.provision("one")
        self.wait("one.begun")
        b.send({"method": "cancel", "params": {"id": first}})
        self.assertEqual(b.answer(first)["error"]["kind"], "canceled")
        down = b.ask("teardown", handle={"sandbox_id": "one"})
        time.sleep(0.1)
        self.assertNotIn(down, b.answers)  # the call goes on, and this one waits for its turn
        os.unlink(os.path.join(self.dir, "one.wait"))
        self.assertIn("result", b.answer(down))
        self.assertEqual(len(b.answers[first]), 1)
        with open(os.path.join(self.dir, "torn")) as f:
            self.assertEqual(f.read(), "one\n")

    def stuck_broker(self, **hello):
        """A host that gives up a canceled call after a tenth of a second."""
        self.write("quick.py", """
            import sys
            from mod import Extension
            host = sys.modules["__main__"]
            host.STUCK_TIME, host.LOOK_TIME = 0.1, 0.01
        """)
        return self.broker(handler="quick:Extension", **hello)

    def cancel(self, b, *ids):
        for id in ids:
            b.send({"method": "cancel", "params": {"id": id}})
        for id in ids:
            self.assertEqual(b.answer(id)["error"]["kind"], "canceled")

    def ended(self, b, method="provision"):
        self.assertEqual(b.process.wait(30), 1)
        b.close()
        self.assertIn(f"Extension.{method} goes on", b"".join(b.said).decode())

    def test_a_canceled_call_that_keeps_the_turn(self):
        b = self.stuck_broker()
        self.write("one.wait")
        first = b.provision("one")
        self.wait("one.begun")
        self.cancel(b, first)
        self.assertIn("result", b.answer(b.provision("two")))  # nobody waits for the first
        self.assertIsNone(b.process.poll())
        b.ask("teardown", handle={"sandbox_id": "one"})
        self.ended(b)
        again = self.broker()
        self.assertIn("result", again.answer(again.ask("teardown", handle={"sandbox_id": "one"})))

    def test_canceled_calls_that_keep_all_slots(self):
        b = self.stuck_broker(concurrency=2)
        calls = []
        for id in ("one", "two"):
            self.write(id + ".wait")
            calls.append(b.provision(id))
            self.wait(id + ".begun")
        self.cancel(b, calls[0])
        third = b.provision("three")
        with self.assertRaises(KeyError):  # a call that was not canceled is waited for
            b.answer(third, 0.5)
        self.assertIsNone(b.process.poll())
        self.cancel(b, calls[1])
        self.ended(b)
        again = self.broker()
        self.assertIn("result", again.answer(again.provision("three")))

    def test_canceled_calls_that_nobody_waits_for_are_bounded(self):
        self.write("many.py", """
            import sys, threading
            from quick import Extension as Quick
            sys.modules["__main__"].MAX_WAITING = 8
            class Extension(Quick):
                def is_alive(self, handle):
                    open(f"{self.config['root']}/{handle['sandbox_id']}.asked", "w").close()
                    threading.Event().wait()
        """)
        self.stuck_broker().close()
        b = self.broker(handler="many:Extension")
        calls = [b.ask("is_alive", handle={"sandbox_id": f"a{n}"}) for n in range(3)]
        for n in range(3):
            self.wait(f"a{n}.asked")
        self.cancel(b, *calls)
        self.assertIn("result", b.answer(b.provision("one")))
        more = [b.ask("is_alive", handle={"sandbox_id": f"b{n}"}) for n in range(6)]
        self.wait("b0.asked")
        with b.change:  # there is room for five, of which the provision may have had one a moment ago
            b.change.wait_for(lambda: any(id in b.answers for id in more), 30)
            self.assertEqual({b.answers[id][0]["error"]["kind"] for id in more if id in b.answers}, {"exhausted"})
        self.assertIsNone(b.process.poll())
        self.cancel(b, more[0])
        self.ended(b, "is_alive")

    def test_a_call_that_heeds_that_it_is_canceled(self):
        self.write("heeds.py", """
            from sandboxer import errors, request
            from mod import Extension as Mod
            class Extension(Mod):
                def provision(self, profile, inputs, host):
                    call = request.current()
                    open(f"{self.config['root']}/{call.id}.{call.timeout}", "w").close()
                    if call.canceled.wait(60):
                        open(f"{self.config['root']}/{call.id}.heeded", "w").close()
                        raise errors.Canceled("nobody wants it")
                    return {}
        """)
        b = self.broker(handler="heeds:Extension", concurrency=1)
        b.last += 1
        first = b.last
        b.send({"id": first, "method": "provision", "timeout_ms": 1500, "params": {"spec": {"id": "one", "generation": 1}, "host": "h"}})
        self.wait("one.1.5")
        down = b.ask("teardown", handle={"sandbox_id": "one"})
        self.cancel(b, first)
        self.assertIn("result", b.answer(down))
        self.wait("one.heeded")
        b.close()
        self.assertNotIn("failed", b"".join(b.said).decode())

    def test_notices_end_with_their_stream(self):
        self.write("tells.py", """
            from sandboxer import request
            from mod import Extension as Mod
            class Extension(Mod):
                def notify(self):
                    canceled, root = request.current().canceled, self.config["root"]
                    def told():
                        yield "one"
                        canceled.wait()
                        open(f"{root}/ended", "w").close()
                    return told()
        """)
        b = self.broker(handler="tells:Extension")
        asked = b.ask("notify", stream="a" * 32, owner="o")
        stream, _ = b.listener.accept()
        with stream, stream.makefile("rb") as reader:
            self.assertEqual(reader.readline(), b"a" * 32 + b"\n")
            self.assertEqual(b.answer(asked)["result"], {})
            self.assertEqual(reader.read(25), b'\x01\x00\x00\x00\x14{"sandbox_id":"one"}')
            stream.shutdown(socket.SHUT_RDWR)
        self.wait("ended")

    def test_killed_in_the_middle(self):
        b = self.broker()
        self.write("one.wait")
        b.provision("one")
        self.wait("one.begun")
        os.kill(b.process.pid, signal.SIGKILL)
        b.process.wait()
        os.unlink(os.path.join(self.dir, "one.wait"))
        again = self.broker()
        self.assertIn("result", again.answer(again.provision("one")))
        with open(os.path.join(self.dir, "torn")) as f:
            self.assertEqual(f.read(), "one\n")  # what the first may have left
        h = again.answer(again.provision("one"))["result"]
        self.assertIn("result", again.answer(again.ask("teardown", handle=h)))

    def test_what_is_not_offered(self):
        b = self.broker()
        for method in ("pause", "description", "__class__", "_make", "nothing"):
            got = b.answer(b.ask(method, handle={"sandbox_id": "one"}))["error"]
            self.assertIn(got["kind"], ("unsupported", "internal"), method)


if __name__ == "__main__":
    unittest.main()
