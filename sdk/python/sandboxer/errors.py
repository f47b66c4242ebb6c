"""Errors whose kind the broker understands.

Raise one of these to say what a caller can do about a failure. Its text goes to callers and must
not hold secrets. Anything else that a method raises is Internal: callers are told the name of the
exception alone, and the log has the rest.
"""

from __future__ import annotations

from typing import Optional


class SandboxError(Exception):
    """A failure with a kind.

    hint says what to do about it. retry_after is in seconds. untouched says that this call made
    nothing and did nothing at its place.
    """

    kind = "internal"

    def __init__(
        self,
        message: str = "",
        *,
        hint: str = "",
        retry_after: Optional[float] = None,
        untouched: bool = False,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.retry_after = retry_after
        self.untouched = untouched


class Invalid(SandboxError):
    """The request has to be changed."""

    kind = "invalid"


class Unauthenticated(SandboxError):
    """The caller has to say who it is."""

    kind = "unauthenticated"


class Denied(SandboxError):
    """The caller may not do this."""

    kind = "denied"


class NotFound(SandboxError):
    """It is not there."""

    kind = "not_found"


class Conflict(SandboxError):
    """It is in the wrong state."""

    kind = "conflict"


class NoCredit(SandboxError):
    """It has to be paid for first."""

    kind = "no_credit"


class Exhausted(SandboxError):
    """There is no room; see retry_after."""

    kind = "exhausted"


class Unsupported(SandboxError):
    """This extension cannot; another may."""

    kind = "unsupported"


class Unavailable(SandboxError):
    """It may work later, or elsewhere."""

    kind = "unavailable"


class Timeout(SandboxError):
    """It did not finish in time."""

    kind = "timeout"


class Failed(SandboxError):
    """The sandbox itself is broken."""

    kind = "failed"


class Canceled(SandboxError):
    """The caller has left."""

    kind = "canceled"


class Internal(SandboxError):
    """A defect."""

    kind = "internal"
