import io
import os
import signal
import tempfile
import threading
import time
import unittest

from sandboxer.command import Command, Exit


class TestRun(unittest.TestCase):
    def run_script(self, script, *args, out=None, canceled=None, **more):
        out, err = out or io.BytesIO(), io.BytesIO()
        argv = ["sh", "-c", script, "sh", *args]
        values = {"env": {}, "dir": "", "user": "", "service": "", "tty": None, "stdin": None, **more}
        c = Command(args=argv, stdout=out, stderr=err, canceled=canceled or threading.Event(), **values)
        return c.run(argv), out.getvalue(), err.getvalue()

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

        ended, out, _ = self.run_script("sleep 1000 & echo $!; wait", out=Out(), canceled=canceled)
        self.assertEqual(ended, Exit(137, "KILL"))
        end = time.monotonic() + 30
        while os.path.exists(f"/proc/{int(out)}") and time.monotonic() < end:
            with open(f"/proc/{int(out)}/stat") as f:
                if f.read().rpartition(")")[2].split()[0] == "Z":
                    break  # nobody has asked for its status yet
            time.sleep(0.01)
        else:
            self.assertFalse(os.path.exists(f"/proc/{int(out)}"))


if __name__ == "__main__":
    unittest.main()
