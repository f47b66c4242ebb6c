import io
import os
import signal
import tempfile
import threading
import time
import unittest

from sandboxer import command, errors
from sandboxer.command import Command, Exit


class TestRun(unittest.TestCase):
    def run_script(self, script, *args, out=None, canceled=None, cwd=None, user="", **more):
        out, err = out or io.BytesIO(), io.BytesIO()
        argv = ["sh", "-c", script, "sh", *args]
        values = {"env": {}, "dir": "", "user": "", "service": "", "tty": None, "stdin": None, **more}
        c = Command(args=argv, stdout=out, stderr=err, canceled=canceled or threading.Event(), **values)
        return c.run(argv, cwd=cwd, user=user), out.getvalue(), err.getvalue()

    def test_how_it_ends(self):
        self.assertEqual(self.run_script("echo out; echo err >&2; exit 7"), (Exit(7), b"out\n", b"err\n"))
        self.assertEqual(self.run_script("kill -TERM $$; sleep 9")[0], Exit(143, "TERM"))
        c = Command(["no-such-program"], {}, "", "", "", None, None, io.BytesIO(), io.BytesIO(), threading.Event())
        self.assertEqual(c.run(c.args), Exit(127))

    def test_all_output(self):
        self.assertEqual(self.run_script("head -c 3000000 /dev/zero; echo end")[1][-4:], b"end\n")

    def test_arguments_are_bytes(self):
        self.assertEqual(self.run_script('printf %s "$1"', os.fsdecode(b"\xff\xc3\xbc"))[1], b"\xff\xc3\xbc")

    def leftover(self, script):
        began = time.monotonic()
        ended, out, _ = self.run_script(script)
        pid = int(out.split()[0])
        self.addCleanup(os.kill, pid, signal.SIGKILL)
        os.kill(pid, 0)  # it runs on
        self.assertEqual(ended, Exit(0))
        self.assertLess(time.monotonic() - began, 60)

    def test_a_child_in_the_background_does_not_hold(self):
        self.leftover("sleep 1000 & echo $!")

    def test_a_child_that_floods_does_not_hold(self):
        at = tempfile.TemporaryDirectory()
        self.addCleanup(at.cleanup)
        self.leftover(f"cd {at.name}; mkfifo fifo; " "(exec 2>/dev/null; trap '' PIPE; read go <fifo; while :; do echo xxxxxxxxxxxxxxxxxxxx; done) & echo $!; echo >fifo")

    def test_canceled(self):
        """What it started ends too."""
        canceled = threading.Event()

        class Out(io.BytesIO):
            def write(self, data):
                canceled.set()
                return super().write(data)

        for script in (
            "sleep 1000 & echo $!; wait",
            # In another session, without its environment, and without the parent that it had.
            "(setsid env -i sh -c 'setsid sleep 1000 >/dev/null 2>&1 & echo $!; exit') & wait; sleep 1000",
            "trap '' HUP INT TERM; sleep 1000 & echo $!; while :; do sleep 1000; done",
        ):
            canceled.clear()
            ended, out, _ = self.run_script(script, out=Out(), canceled=canceled)
            self.assertEqual(ended, Exit(137, "KILL"))
            self.ended(int(out))  # now, and not soon

    def ended(self, pid):
        try:
            with open(f"/proc/{pid}/stat") as f:
                self.assertIn(f.read().rpartition(")")[2].split()[0], "ZX")  # nobody has asked for its status yet
        except FileNotFoundError:
            pass

    def test_output_that_nobody_takes(self):
        """The command ends with what it started, as if it was canceled."""
        pids = []

        class Out(io.BytesIO):
            def write(self, data):
                pids.extend(data.split())
                raise BrokenPipeError

        self.run_script("(setsid env -i sleep 1000) >/dev/null 2>&1 & echo $!; while echo more; do :; done", out=Out())
        self.ended(int(pids[0]))

    def test_where_and_who(self):
        with self.assertRaisesRegex(errors.Invalid, "/no/such is no directory"):
            self.run_script("true", cwd="/no/such")
        with self.assertRaisesRegex(errors.Invalid, "there is no user 'no-such-user'"):
            self.run_script("true", user="no-such-user")
        me = f"{os.getuid()}:{os.getgid()}"
        for user in ("", str(os.getuid()), me):
            self.assertEqual(self.run_script('echo "$(id -u):$(id -g)"', user=user)[1].decode().strip(), me, user)
        if os.geteuid() == 0:
            self.assertEqual(self.run_script('echo "$(id -u):$(id -g):$(id -G)"', user="12345:54321")[1], b"12345:54321:54321\n")
        else:
            with self.assertRaises(errors.Unsupported):
                self.run_script("true", user="12345")

    def test_what_cannot_be_run(self):
        at = tempfile.TemporaryDirectory()
        self.addCleanup(at.cleanup)
        plain = os.path.join(at.name, "plain")
        with open(plain, "w") as f:
            f.write("no program\n")
        for argv, code in (([at.name], 126), ([plain], 126), ([plain + "/below"], 127)):
            for tty in (None, (80, 24)):
                out, err = io.BytesIO(), io.BytesIO()
                c = Command(argv, {}, "", "", "", tty, None, out, err, threading.Event())
                self.assertEqual(c.run(argv), Exit(code))
                self.assertIn(argv[0].encode(), (out if tty else err).getvalue())
        os.chmod(plain, 0o755)  # and it says of no interpreter
        c = Command([plain], {}, "", "", "", None, None, io.BytesIO(), io.BytesIO(), threading.Event())
        self.assertEqual(c.run([plain]), Exit(126))
        with self.assertRaises(errors.Invalid):
            c.run(["a\0b"])

    def test_a_terminal_without_input_ends(self):
        self.assertEqual(self.run_script("cat; exit 5", tty=(80, 24))[0], Exit(5))

    def test_what_nobody_looks_at_is_bounded(self):
        c = Command(["true"], {}, "", "", "", None, None, io.BytesIO(), io.BytesIO(), threading.Event())
        for n in range(1000):
            command._put(c.resizes, (n, 24))
            command._put(c.signals, f"RTMIN+{n}")
        self.assertEqual(command._taken(c.resizes), [(999, 24)])
        taken = command._taken(c.signals)
        self.assertEqual((len(taken), taken[-1]), (64, "RTMIN+999"))
        # A size without a terminal, and what is no signal, end nothing.
        c.resizes.put((99999, -1))
        for name in ("_IGN", "NOTHING"):
            c.signals.put(name)
        self.assertEqual(c.run(["sh", "-c", "sleep 0.1; exit 4"]), Exit(4))
        c.resizes.put((99999, -1))
        c.tty = (80, 24)
        self.assertEqual(c.run(["sh", "-c", "sleep 0.1; exit 4"]), Exit(4))


if __name__ == "__main__":
    unittest.main()
