"""moto's S3 server in a process of its own, at the port of its argument: prints its URL, and does what lines tell it.

throttle N   the next N uploads of a part are answered "503 SlowDown"
pair         an upload of a part is answered when a second one has come
said         prints how many were throttled, and how many parts were on their way at once at most
"""

from __future__ import annotations

import logging
import sys
import threading
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
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
        self.pair = False

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        if environ["REQUEST_METHOD"] != "PUT" or "partNumber" not in environ.get("QUERY_STRING", ""):
            return self.application(environ, start_response)
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
    server = Server()
    listening = make_server("127.0.0.1", int(sys.argv[1]), server, threaded=True, request_handler=Quiet)
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    print(f"http://127.0.0.1:{listening.port}", file=out, flush=True)
    for line in sys.stdin:
        match line.split():
            case ["throttle", number]:
                server.to_throttle = int(number)
            case ["pair"]:
                server.pair = True
            case ["said"]:
                print(server.throttled, server.most, file=out, flush=True)
