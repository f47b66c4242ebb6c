"""What else there is to know about the call that a method answers."""

from __future__ import annotations

import contextvars
import threading
from dataclasses import dataclass, field
from typing import Any, Callable, Optional


@dataclass(frozen=True)
class Request:
    """The call under way.

    id and generation name the sandbox, owner the installation whose it is. env is the environment
    of the sandbox, which may hold secrets: it is not logged, and not to be put into a handle.
    limits, network, ports, labels and the rest of the request are in spec, by the names of the
    broker's JSON. canceled is set when the caller has left. progress(step, done, total) tells how
    far a provision is, in bytes.
    """

    method: str
    id: str = ""
    generation: int = 0
    owner: str = ""
    env: dict[str, str] = field(default_factory=dict, repr=False)
    spec: dict[str, Any] = field(default_factory=dict, repr=False)
    timeout: Optional[float] = None
    canceled: threading.Event = field(default_factory=threading.Event, repr=False)
    progress: Callable[..., None] = field(default=lambda step, done=0, total=0: None, repr=False)


_current: "contextvars.ContextVar[Request]" = contextvars.ContextVar("sandboxer_request")


def current() -> Request:
    """Return the call that this thread answers. LookupError: it answers none."""
    return _current.get()
