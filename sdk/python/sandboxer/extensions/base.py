"""What every extension class derives from."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from typing import Any

from sandboxer.models import MeterQuote, Profile


class SandboxExtension(ABC):
    """A backend that makes sandboxes, on machines of one's own or as a service."""

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        self.config: dict[str, Any] = config or {}

    @staticmethod
    def new_sandbox_id(inputs: dict[str, str]) -> str:
        """The ID that inputs name, or else eight random characters."""
        return inputs.get("sandbox_id") or str(uuid.uuid4())[:8]

    @abstractmethod
    def provision(
        self, profile: Profile, inputs: dict[str, str], host: str
    ) -> dict[str, str]:
        """Makes the sandbox, or attaches to it. The handle that it returns has sandbox_id and
        host, and whatever the other methods need."""

    @abstractmethod
    def wait_ready(self, handle: dict[str, str]) -> dict[str, str]:
        """Returns how the sandbox is reached, once it is."""

    @abstractmethod
    def teardown(self, handle: dict[str, str]) -> dict[str, str]:
        """Removes what was made for the sandbox and says what that was."""

    def estimate_cost(
        self,
        profile: Profile,
        inputs: dict[str, str],
        *,
        duration_s: int = 3600,
    ) -> MeterQuote | None:
        """The price of a sandbox before it exists; None if nothing is known to be charged."""
        return None

    def meter_actual(self, handle: dict[str, str], *, duration_s: float) -> float | None:
        """What the sandbox has cost since it was made, in USD; also asked after teardown."""
        return None

    def supports_snapshots(self) -> bool:
        """Whether snapshot and restore_from_snapshot work."""
        return False

    def snapshot(self, handle: dict[str, str]) -> dict[str, str]:
        """Saves the sandbox. What it returns has snapshot_id, and whatever restoring needs."""
        raise NotImplementedError(f"{type(self).__name__} does not support snapshots")

    def restore_from_snapshot(
        self,
        profile: Profile,
        snapshot_meta: dict[str, str],
        inputs: dict[str, str],
        host: str,
    ) -> dict[str, str]:
        """Makes a new sandbox of what snapshot saved."""
        raise NotImplementedError(f"{type(self).__name__} does not support restore")
