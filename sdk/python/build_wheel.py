"""Builds the wheel with nothing but the standard library (PEP 517).

python3 build_wheel.py [DIR] does it without a front end.
"""

import base64
import hashlib
import os
import re
import sys
import zipfile

HERE = os.path.dirname(os.path.abspath(__file__))


def _project(name):
    with open(os.path.join(HERE, "pyproject.toml"), encoding="utf-8") as f:
        return re.search(rf'^{name} = "([^"]*)"$', f.read(), re.M).group(1)


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    version = _project("version")
    info = f"sandboxer-{version}.dist-info"
    files = {}
    for root, dirs, names in os.walk(os.path.join(HERE, "sandboxer")):
        dirs[:] = sorted(d for d in dirs if d != "__pycache__")
        for name in sorted(names):
            if name.endswith(".py"):
                path = os.path.join(root, name)
                with open(path, "rb") as f:
                    files[os.path.relpath(path, HERE).replace(os.sep, "/")] = f.read()
    files[f"{info}/METADATA"] = (
        f"Metadata-Version: 2.1\nName: sandboxer\nVersion: {version}\n"
        f"Summary: {_project('description')}\nRequires-Python: {_project('requires-python')}\n"
    ).encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: build_wheel\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    record = ""
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(data)}\n"
    files[f"{info}/RECORD"] = (record + f"{info}/RECORD,,\n").encode()
    wheel = f"sandboxer-{version}-py3-none-any.whl"
    with zipfile.ZipFile(os.path.join(wheel_directory, wheel), "w", zipfile.ZIP_DEFLATED) as z:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name)  # of 1980, so that the same files make the same wheel
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            z.writestr(entry, data)
    return wheel


if __name__ == "__main__":
    print(build_wheel(sys.argv[1] if len(sys.argv) > 1 else "."))
