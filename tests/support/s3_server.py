"""moto's S3 server with the bucket "checkpoints", at the port of its argument: prints its URL, and does what lines say.

throttle N   the next N uploads of a part are answered "503 SlowDown"; "throttled" prints how many were
pair         an upload of a part is answered when a second one has come; "most" prints how many came at once
die          the process ends at the second part of the next upload
begun        prints how many uploads in parts are not complete
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from typing import Any

from moto.core import DEFAULT_ACCOUNT_ID
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from moto.s3.models import s3_backends
from werkzeug.serving import WSGIRequestHandler, make_server

SLOW_DOWN = (
    b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
)


class Server:
    """Wraps moto's application."""

    def __init__(self) -> None:
        self.application = DomainDispatcherApplication(create_backend_app)
        self.lock = threading.Condition()
        self.to_throttle = self.throttled = self.on_their_way = self.most = 0
        self.pair = self.dies = False

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        if environ["REQUEST_METHOD"] != "PUT" or "partNumber" not in environ.get("QUERY_STRING", ""):
            return self.application(environ, start_response)
        if self.dies and "partNumber=2" in environ["QUERY_STRING"]:
            os._exit(9)
        with self.lock:
            if self.to_throttle:
                self.to_throttle -= 1
                self.throttled += 1
                environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
                start_response("503 Slow Down", [("Content-Type", "application/xml"), ("Connection", "close")])
                return [SLOW_DOWN]
            self.on_their_way += 1
            self.most = max(self.most, self.on_their_way)
            self.lock.notify_all()
            if self.pair:
                self.lock.wait_for(lambda: self.most > 1, timeout=30)
        try:
            return self.application(environ, start_response)
        finally:
            with self.lock:
                self.on_their_way -= 1


class Quiet(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"


def main() -> None:
    logging.disable(logging.CRITICAL)
    out, sys.stdout = sys.stdout, sys.stderr
    server, backend = Server(), s3_backends[DEFAULT_ACCOUNT_ID]["aws"]
    backend.create_bucket("checkpoints", "us-east-1")
    listening = make_server("127.0.0.1", int(sys.argv[1]), server, threaded=True, request_handler=Quiet)
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    print(f"http://127.0.0.1:{listening.port}", file=out, flush=True)
    for line in sys.stdin:
        match line.split():
            case ["throttle", number]:
                server.to_throttle = int(number)
            case ["pair"]:
                server.pair = True
            case ["die"]:
                server.dies = True
            case ["begun"]:
                print(len(backend.buckets["checkpoints"].multiparts), file=out, flush=True)
            case [what]:
                print(getattr(server, what), file=out, flush=True)
