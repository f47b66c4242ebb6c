"""For tests of extension classes."""

from __future__ import annotations

import subprocess
from contextlib import contextmanager
from typing import Any, Iterator, Optional, Sequence

from sandboxer import request


@contextmanager
def answering(**values: Any) -> Iterator[request.Request]:
    """Have methods find a call to answer: sandboxer.request.current() in them is a Request of values."""
    call = request.Request(method=values.pop("method", "test"), **values)
    token = request._current.set(call)
    try:
        yield call
    finally:
        request._current.reset(token)


class SSHConfig:
    """How a machine is reached by SSH. Tests patch run:

        with patch.object(SSHConfig, "run", return_value=(0, "ready")):
            …

    A class that goes by SSH can use it as it is: it runs the machine's own ssh, without questions.
    """

    def __init__(self, target: str, *, port: Optional[int] = None, identity: Optional[str] = None, options: Sequence[str] = ()) -> None:
        if not target or target.startswith("-"):
            raise ValueError(f"{target!r} is no SSH destination")
        self.target = target
        self.port = port
        self.identity = identity
        self.options = tuple(options)

    def argv(self, command: str) -> list[str]:
        """Return the command line that runs a shell command there."""
        out = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"]
        if self.port:
            out += ["-p", str(self.port)]
        if self.identity:
            out += ["-i", self.identity]
        for option in self.options:
            out += ["-o", option]
        return [*out, "--", self.target, command]

    def run(self, command: str, *, timeout: float = 60, input: str = "") -> tuple[int, str]:
        """Run a shell command there, and return its exit status and its output, with errors.

        255 is the status of ssh itself, 124 that of a command that did not end in time.
        """
        try:
            done = subprocess.run(
                self.argv(command), input=input, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout, check=False, text=True, errors="replace",
            )
        except subprocess.TimeoutExpired:
            return 124, f"no end within {timeout:g} seconds"
        return done.returncode, done.stdout
