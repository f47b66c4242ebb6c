"""The base class of extensions."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from typing import Any, Optional

from sandboxer.models import MeterQuote, Profile


class SandboxExtension(ABC):
    """A backend that makes sandboxes.

    The three abstract methods are enough. They may block; calls of one sandbox come one after the
    other, those of several side by side in threads. All dicts hold strings only. What else a class
    can do it says by having the method: exec, discover, is_alive and others
    (docs/how-to/write-an-extension.md).
    """

    def __init__(self, config: Optional[dict[str, Any]] = None) -> None:
        """config is the block config: of the extension's file."""
        self.config: dict[str, Any] = config or {}

    @staticmethod
    def new_sandbox_id(inputs: dict[str, str]) -> str:
        """Return the ID that the caller chose, or a fresh one of 8 characters."""
        return inputs.get("sandbox_id") or str(uuid.uuid4())[:8]

    @abstractmethod
    def provision(self, profile: Profile, inputs: dict[str, str], host: str) -> dict[str, str]:
        """Make a sandbox, or attach to one, and return its handle.

        inputs["sandbox_id"] is its ID. The handle has sandbox_id, host, and what the other methods
        need; it is stored, shown to operators and must not hold secrets.
        """

    @abstractmethod
    def wait_ready(self, handle: dict[str, str]) -> dict[str, str]:
        """Wait until the sandbox accepts work, and return how it is reached.

        The keys ssh, remote_dir, host, compose_project and url have a meaning; others are shown as
        they are.
        """

    @abstractmethod
    def teardown(self, handle: dict[str, str]) -> dict[str, str]:
        """Remove everything that was made for the sandbox, and return what was done.

        What is not there any more is success. handle may have sandbox_id and host alone.
        """

    def estimate_cost(
        self,
        profile: Profile,
        inputs: dict[str, str],
        *,
        duration_s: int = 3600,
    ) -> Optional[MeterQuote]:
        """Return what a sandbox would cost; None if that is not known."""
        return None

    def meter_actual(self, handle: dict[str, str], *, duration_s: float) -> Optional[float]:
        """Return what the sandbox has cost so far, in USD; None if that is not known."""
        return None

    def supports_snapshots(self) -> bool:
        """Say whether snapshot and restore_from_snapshot work."""
        return False

    def snapshot(self, handle: dict[str, str]) -> dict[str, str]:
        """Save the sandbox and return what restoring needs, with snapshot_id in it."""
        raise NotImplementedError(f"{type(self).__name__} does not support snapshots")

    def restore_from_snapshot(
        self,
        profile: Profile,
        snapshot_meta: dict[str, str],
        inputs: dict[str, str],
        host: str,
    ) -> dict[str, str]:
        """Make a sandbox of what snapshot returned; the result is that of provision."""
        raise NotImplementedError(f"{type(self).__name__} does not support restore")
