"""Errors that an extension raises: one class for each kind that the broker knows.

The text of each travels to callers: it says what failed and why, and holds no secrets.
Whatever else an extension raises is a bug to the broker, and callers see none of its text.
"""

from __future__ import annotations

from typing import Optional


class SandboxError(Exception):
    """Base of all of them; kind names the class to the broker.

    hint says what to do next, retry_after after how many seconds to try again, public what
    callers who are no administrators get instead of text and hint. untouched says that the
    call made nothing and did nothing at its place.
    """

    kind = "internal"

    def __init__(
        self,
        message: str = "",
        *,
        hint: str = "",
        retry_after: Optional[float] = None,
        public: str = "",
        untouched: bool = False,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.retry_after = retry_after
        self.public = public
        self.untouched = untouched


class Invalid(SandboxError):
    """The request is wrong."""

    kind = "invalid"


class Unauthenticated(SandboxError):
    """Nobody knows who asks."""

    kind = "unauthenticated"


class Denied(SandboxError):
    """Who asks may not."""

    kind = "denied"


class NotFound(SandboxError):
    """It is not there."""

    kind = "not_found"


class Conflict(SandboxError):
    """It is in the wrong state."""

    kind = "conflict"


class NoCredit(SandboxError):
    """Somebody has to pay first."""

    kind = "no_credit"


class Exhausted(SandboxError):
    """There is no room now."""

    kind = "exhausted"


class Unsupported(SandboxError):
    """This extension cannot do it."""

    kind = "unsupported"


class Unavailable(SandboxError):
    """It may work later, or elsewhere."""

    kind = "unavailable"


class Timeout(SandboxError):
    """It did not finish in time."""

    kind = "timeout"


class Failed(SandboxError):
    """The sandbox itself is broken; trying again does not help."""

    kind = "failed"


class Canceled(SandboxError):
    """Who asked has left."""

    kind = "canceled"


class Internal(SandboxError):
    """A bug."""

    kind = "internal"


KINDS = {
    c.kind: c
    for c in (
        Invalid, Unauthenticated, Denied, NotFound, Conflict, NoCredit, Exhausted,
        Unsupported, Unavailable, Timeout, Failed, Canceled, Internal,
    )
}
