"""Runs an extension class beside the broker: python3 -I -u host.py.

Standard input and output are the control connection of the extension protocol, the working
directory is the extension's own. This file is written so that an old Python can read it and
say that it is too old.
"""
import json
import os
import sys

if __name__ == "__main__":
    if sys.version_info < (3, 9):
        found = "Python 3.9 or later is needed; %s is %s" % (sys.executable, sys.version.split()[0])
        sys.stdin.readline()
        fault = {"at": "python", "message": found}
        error = {"kind": "invalid", "message": found, "faults": [fault]}
        hello = {"protocols": [1], "program": "sandboxer for Python", "error": error}
        sys.stdout.write(json.dumps({"hello": hello}) + "\n")
        sys.stdout.flush()
        sys.exit(1)
    # Nothing is written beside the files of others.
    sys.pycache_prefix = os.path.join(os.getcwd(), "pycache")
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    from sandboxer import _serve

    _serve.main()
