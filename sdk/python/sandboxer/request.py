"""What else there is to know about the call that a method answers."""

from __future__ import annotations

import contextvars
import datetime
import threading
from dataclasses import dataclass, field
from typing import Any, Callable, Optional


@dataclass(frozen=True)
class Request:
    """The call under way.

    id and generation name the sandbox, owner the installation whose it is. env is the environment
    of the sandbox, which may hold secrets: it is not logged, and not to be put into a handle.
    limits, network, ports, labels and the rest of the request are in spec, by the names of the
    broker's JSON. progress(step, done, total) tells how far a provision is, in bytes.

    fuse is when a class that has renew destroys a new sandbox by itself; None for never.
    snapshot_id is the broker's ID for what snapshot saves. A class may use it as its own; it is told
    it too when one that was cut short is dropped, of which there is nothing else to tell.

    timeout is how many seconds the caller gives the call, from its beginning; None for no limit.
    canceled is set when they are over or the caller has left, and ends canceled.wait(seconds),
    which is a sleep that can be broken off. Nobody gets the method's result then; but it keeps its
    thread and its sandbox's turn until it returns or raises, so it should do so soon. If it goes on
    for 30 seconds and other calls wait for it, the process is ended and started again.
    """

    method: str
    id: str = ""
    generation: int = 0
    owner: str = ""
    env: dict[str, str] = field(default_factory=dict, repr=False)
    spec: dict[str, Any] = field(default_factory=dict, repr=False)
    fuse: Optional[datetime.datetime] = None
    snapshot_id: str = ""
    timeout: Optional[float] = None
    canceled: threading.Event = field(default_factory=threading.Event, repr=False)
    progress: Callable[..., None] = field(default=lambda step, done=0, total=0: None, repr=False)


_current: "contextvars.ContextVar[Request]" = contextvars.ContextVar("sandboxer_request")


def current() -> Request:
    """Return the call that this thread answers. LookupError: it answers none."""
    return _current.get()
