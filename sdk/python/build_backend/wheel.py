"""Builds the wheel of the package sandboxer with the standard library alone (PEP 517)."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import tarfile
import zipfile
from typing import Any, Optional

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
STAMP = (1980, 1, 1, 0, 0, 0)  # two builds of the same files are the same


def _version() -> str:
    with open(os.path.join(ROOT, "sandboxer", "__init__.py"), encoding="utf-8") as f:
        found = re.search(r'^__version__ = "([^"]+)"$', f.read(), re.MULTILINE)
    if not found:
        raise RuntimeError("sandboxer/__init__.py has no __version__")
    return found.group(1)


def _metadata() -> str:
    return (
        "Metadata-Version: 2.1\nName: sandboxer\n"
        f"Version: {_version()}\nSummary: Write extensions of sandboxer in Python\nRequires-Python: >=3.9\n"
    )


def _sources() -> list[str]:
    out = []
    for directory, directories, files in os.walk(os.path.join(ROOT, "sandboxer")):
        directories[:] = sorted(d for d in directories if d != "__pycache__")
        out += [os.path.join(directory, f) for f in sorted(files) if f.endswith(".py")]
    return out


def build_wheel(wheel_directory: str, config_settings: Optional[dict[str, Any]] = None, metadata_directory: Optional[str] = None) -> str:
    """Write the wheel and return its name."""
    version = _version()
    info = f"sandboxer-{version}.dist-info"
    files = [(os.path.relpath(path, ROOT), _read(path)) for path in _sources()]
    files += [
        (f"{info}/METADATA", _metadata().encode()),
        (f"{info}/WHEEL", b"Wheel-Version: 1.0\nGenerator: sandboxer\nRoot-Is-Purelib: true\nTag: py3-none-any\n"),
    ]
    record = "".join(f"{name},sha256={_digest(data)},{len(data)}\n" for name, data in files) + f"{info}/RECORD,,\n"
    files.append((f"{info}/RECORD", record.encode()))
    name = f"sandboxer-{version}-py3-none-any.whl"
    with zipfile.ZipFile(os.path.join(wheel_directory, name), "w", zipfile.ZIP_DEFLATED) as wheel:
        for path, data in files:
            entry = zipfile.ZipInfo(path, STAMP)
            entry.external_attr = 0o644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            wheel.writestr(entry, data)
    return name


def build_sdist(sdist_directory: str, config_settings: Optional[dict[str, Any]] = None) -> str:
    """Write the source distribution and return its name."""
    version = _version()
    base = f"sandboxer-{version}"
    with tarfile.open(os.path.join(sdist_directory, f"{base}.tar.gz"), "w:gz", format=tarfile.PAX_FORMAT) as sdist:
        for path in [*_sources(), os.path.join(ROOT, "pyproject.toml"), os.path.abspath(__file__)]:
            sdist.add(path, os.path.join(base, os.path.relpath(path, ROOT)))
    return f"{base}.tar.gz"


def _read(path: str) -> bytes:
    with open(path, "rb") as f:
        return f.read()


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
