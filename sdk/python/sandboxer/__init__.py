"""Sandbox extensions in Python: the classes, and what runs them beside the broker.

An author derives from sandboxer.extensions.base.SandboxExtension, or from
sandboxer.extensions.full.FullExtension for more than the basic methods.
"""

from sandboxer.models import Request, request

__version__ = "1.0"

__all__ = ["Request", "request"]
