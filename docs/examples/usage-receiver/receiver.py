#!/usr/bin/env python3
"""Takes usage events of sandboxer and keeps each once, in SQLite. Needs Python 3.9, and nothing else.

    USAGE_KEYS="whsec_… whsec_…" receiver.py 127.0.0.1:8099 books.db

GET /total answers how many rows there are, and what they charge.
"""

import base64
import hashlib
import hmac
import json
import os
import sqlite3
import sys
import time
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MAX_BODY = 1 << 20  # no batch is larger
MAX_AGE = 5 * 60  # seconds between the signature and now: an older request is a recorded one

KEYS = [base64.b64decode(k.removeprefix("whsec_"), validate=True) for k in os.environ["USAGE_KEYS"].split()]
BOOKS = sys.argv[2]


def signed(headers, body):
    """Whether one of our keys made one of the signatures."""
    at = headers.get("webhook-timestamp", "")
    if not (at.isascii() and at.isdigit()) or abs(time.time() - int(at)) > MAX_AGE:
        return False
    content = (headers.get("webhook-id", "") + "." + at + ".").encode() + body
    for key in KEYS:
        want = b"v1," + base64.b64encode(hmac.new(key, content, hashlib.sha256).digest())
        if any(hmac.compare_digest(want, got.encode()) for got in headers.get("webhook-signature", "").split()):
            return True
    return False


def keep(events):
    """Writes all events or none. One that is there already is skipped: that is why it is counted once."""
    db = sqlite3.connect(BOOKS, timeout=10)
    try:
        with db:  # one transaction, on disk before we answer
            db.execute("CREATE TABLE IF NOT EXISTS usage (source TEXT, id TEXT, data TEXT, PRIMARY KEY (source, id))")
            db.executemany("INSERT OR IGNORE INTO usage VALUES (?, ?, ?)", ((e["source"], e["id"], json.dumps(e["data"])) for e in events))
    finally:
        db.close()


class Receiver(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 30

    def answer(self, status, text):
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()) or int(length) > MAX_BODY:
            self.close_connection = True
            return self.answer(413, "a batch has 1 MiB at most")
        body = self.rfile.read(int(length))
        if not signed(self.headers, body):
            return self.answer(401, "no valid signature")
        try:
            events = json.loads(body)
            known = all(e["specversion"] == "1.0" and e["type"] == "dev.sandboxer.usage.v1" and e["source"] and e["id"] and e["data"] for e in events)
        except (ValueError, TypeError, KeyError):
            known = False
        if not known:
            return self.answer(422, "not a batch of usage events")
        try:
            keep(events)
        except sqlite3.Error as e:
            return self.answer(503, str(e))  # it comes again
        self.answer(204, "")

    def do_GET(self):
        keep([])
        db = sqlite3.connect(BOOKS, timeout=10)
        rows = [json.loads(data) for (data,) in db.execute("SELECT data FROM usage")]
        db.close()
        self.answer(200, json.dumps({"rows": len(rows), "charged": str(sum((Decimal(r["charged"]) for r in rows), Decimal(0)))}))

    def log_message(self, *args):
        pass


host, _, port = sys.argv[1].rpartition(":")
server = ThreadingHTTPServer((host, int(port)), Receiver)
print("http://%s:%d" % server.server_address, flush=True)
server.serve_forever()
