"""Helps to test extensions that work over SSH, without a machine to reach.

SSHConfig.run is the one place where SSH is spoken, so a test replaces it:

    with patch.object(SSHConfig, "run", return_value=(0, "ready")):
        ext = VMPackerExtension()
        handle = ext.provision(profile, {"vm": "haskell-build"}, "localhost")
"""

from __future__ import annotations

import shlex
import subprocess
from dataclasses import dataclass

from sandboxer import errors
from sandboxer.extensions.base import SandboxExtension

MAX_OUTPUT = 1 << 20


@dataclass(frozen=True)
class SSHConfig:
    """Where ssh goes: a destination as ssh takes it, user@host or the name of its own
    configuration, and what else is to be said on its command line."""

    destination: str
    port: int = 0
    identity_file: str = ""
    connect_timeout: int = 10

    def argv(self, command: str) -> list[str]:
        """The command line that runs a shell command there."""
        if not self.destination or self.destination.startswith("-"):
            raise errors.Invalid(f"{self.destination!r} is no SSH destination")
        argv = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={self.connect_timeout}"]
        if self.port:
            argv += ["-p", str(self.port)]
        if self.identity_file:
            argv += ["-i", self.identity_file]
        return [*argv, "--", self.destination, command]

    def run(self, command: str, *, timeout: float = 60) -> tuple[int, str]:
        """Runs a shell command there; returns its exit code and what it wrote. ssh itself
        answers 255 when it does not get there."""
        try:
            p = subprocess.run(
                self.argv(command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=timeout,
            )
        except subprocess.TimeoutExpired:
            raise errors.Timeout(f"{self.destination} did not answer within {timeout:g} seconds") from None
        except FileNotFoundError:
            raise errors.Unavailable("there is no ssh on this machine", hint="install OpenSSH's client") from None
        return p.returncode, p.stdout[:MAX_OUTPUT].decode("utf-8", "replace").strip()


class VMPackerExtension(SandboxExtension):
    """A workspace on a virtual machine that runs already, which stays.

    It takes the inputs vm or ssh_target, or tunnel_port alone, which is a port of this
    machine; and ssh_port and workspace_dir. It shows how a class uses SSHConfig; the
    program's own adapter vm-packer is the one to use.
    """

    def provision(self, profile, inputs, host):
        target = inputs.get("ssh_target") or inputs.get("vm")
        port = inputs.get("ssh_port") or ""
        if not target and inputs.get("tunnel_port"):
            target, port = "localhost", inputs["tunnel_port"]
        if not target:
            raise ValueError("one of the inputs vm, ssh_target and tunnel_port is needed")
        if port and not port.isdigit():
            raise ValueError(f"ssh_port {port!r} is no port")
        id = self.new_sandbox_id(inputs)
        handle = {
            "sandbox_id": id,
            "host": host,
            "vm_target": target,
            "ssh_port": port,
            "remote_dir": f"{inputs.get('workspace_dir') or '/build'}/sbx-{id}",
        }
        self._run(handle, f"mkdir -p {shlex.quote(handle['remote_dir'])}")
        return handle

    def wait_ready(self, handle):
        dir = shlex.quote(handle["remote_dir"])
        if "ready" not in self._run(handle, f"test -d {dir} && echo ready || echo missing"):
            raise errors.NotFound(f"{handle['vm_target']} has no {handle['remote_dir']}")
        port = f":{handle['ssh_port']}" if handle["ssh_port"] else ""
        return {
            "host": handle["host"],
            "ssh": handle["vm_target"] + port,
            "remote_dir": handle["remote_dir"],
        }

    def teardown(self, handle):
        self._run(handle, f"rm -rf {shlex.quote(handle['remote_dir'])}")
        return {"removed": handle["remote_dir"], "kept": handle["vm_target"]}

    @staticmethod
    def _run(handle, command):
        code, out = SSHConfig(handle["vm_target"], int(handle["ssh_port"] or 0)).run(command)
        if code == 255:
            raise errors.Unavailable(f"{handle['vm_target']} cannot be reached by SSH", untouched=True)
        if code:
            raise errors.Failed(f"{handle['vm_target']} refused: {out}")
        return out
