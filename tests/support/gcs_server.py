"""A stand-in of what gcsfs speaks with Google Cloud Storage: objects, resumable uploads, lists, batches.

It has the port of its argument, prints its URL and serves until its standard input ends. One bucket, "checkpoints", in
memory. The line "throttle N" answers the next N pieces of an upload "503"; "throttled" prints how many were; "die" ends
the process in the middle of the next one; "begun" prints how many uploads are not complete. After "locked" a request
without the token that /token gives is refused.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

OBJECTS: dict[str, bytes] = {}
UPLOADS: dict[str, tuple[str, bytearray]] = {}  # begun ones: name, bytes so far
LOCK = threading.RLock()
STATE = {"throttle": 0, "throttled": 0, "die": 0, "locked": 0}
TOKEN = "of-the-run"


def about(name: str) -> dict[str, Any]:
    digest = hashlib.md5(OBJECTS[name], usedforsecurity=False).digest()
    return {
        "kind": "storage#object", "name": name, "bucket": "checkpoints", "size": str(len(OBJECTS[name])),
        "md5Hash": base64.b64encode(digest).decode(), "generation": "1", "storageClass": "STANDARD",
        "timeCreated": "2026-01-01T00:00:00Z", "updated": "2026-01-01T00:00:00Z",
    }  # fmt: skip


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def parse_request(self) -> bool:
        if not super().parse_request():
            return False
        if STATE["locked"] and self.path != "/token" and self.headers["Authorization"] != f"Bearer {TOKEN}":
            self.close_connection = True
            self.say(403, {"error": {"code": 403, "message": "Forbidden"}})
            return False
        return True

    def say(self, status: int, content: Any = b"", **headers: str) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content_Type": "application/json", **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def missing(self) -> None:
        self.say(404, {"error": {"code": 404, "message": "Not Found"}})

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        with LOCK:
            if found := re.fullmatch(r"/(?:download/)?storage/v1/b/checkpoints/o/(.+)", url.path):
                name = unquote(found[1])
                if name not in OBJECTS:
                    return self.missing()
                return self.content(name) if query.get("alt") == "media" else self.say(200, about(name))
            if url.path.rstrip("/") == "/storage/v1/b/checkpoints/o":
                return self.listed(query.get("prefix", ""), query.get("delimiter", ""))
            if url.path.rstrip("/") == "/storage/v1/b/checkpoints":
                return self.say(200, {"kind": "storage#bucket", "name": "checkpoints", "id": "checkpoints"})
        return self.missing()

    def content(self, name: str) -> None:
        data = OBJECTS[name]
        if found := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(found[1]), min(int(found[2] or len(data) - 1), len(data) - 1)
            if first >= len(data):
                return self.say(416)
            return self.say(206, data[first : last + 1], Content_Range=f"bytes {first}-{last}/{len(data)}")
        return self.say(200, data)

    def listed(self, prefix: str, delimiter: str) -> None:
        names = sorted(name for name in OBJECTS if name.startswith(prefix))
        folders = set()
        if delimiter:
            inside = [name for name in names if delimiter in name[len(prefix) :]]
            folders = {prefix + name[len(prefix) :].partition(delimiter)[0] + delimiter for name in inside}
            names = [name for name in names if name not in inside]
        self.say(200, {"items": [about(name) for name in names], "prefixes": sorted(folders)})

    def do_POST(self) -> None:
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        if url.path.startswith("/resumable/"):
            return self.piece(url.path.rpartition("/")[2])
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if url.path == "/token":
            return self.say(200, {"access_token": TOKEN, "token_type": "Bearer", "expires_in": 3600})
        with LOCK:
            if url.path == "/upload/storage/v1/b/checkpoints/o" and query["uploadType"] == "resumable":
                key = f"{len(UPLOADS):032d}"
                UPLOADS[key] = (query.get("name") or json.loads(body)["name"], bytearray())
                return self.say(200, Location=f"http://{self.headers['Host']}/resumable/{key}")
            if url.path == "/upload/storage/v1/b/checkpoints/o":
                boundary = self.headers["Content-Type"].partition("boundary=")[2].strip('"').encode()
                _, first, second, _ = body.split(b"--" + boundary)
                name = json.loads(first.partition(b"\n\n" if b"\n\n" in first else b"\r\n\r\n")[2])["name"]
                blank = b"\n\n" if b"\n\n" in second[:200] else b"\r\n\r\n"
                data = second.partition(blank)[2]
                OBJECTS[name] = data.removesuffix(b"\n").removesuffix(b"\r")
                return self.say(200, about(name))
            if url.path == "/batch/storage/v1":
                return self.batch(body.decode())
        return self.missing()

    def piece(self, key: str) -> None:
        if STATE["die"]:
            self.rfile.read(1000)
            os._exit(9)
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with LOCK:
            if STATE["throttle"]:
                STATE["throttle"] -= 1
                STATE["throttled"] += 1
                return self.say(503, {"error": {"code": 503, "message": "slow down"}})
            if key not in UPLOADS:
                return self.missing()
            name, got = UPLOADS[key]
            found = re.fullmatch(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)", self.headers["Content-Range"])
            assert found is not None, self.headers["Content-Range"]
            if found[1] is not None:
                got[int(found[1]) :] = data
            if found[3] == "*":
                return self.say(308, Range=f"bytes=0-{len(got) - 1}")
            OBJECTS[name] = bytes(got)
            del UPLOADS[key]
            return self.say(200, about(name))

    def do_PUT(self) -> None:
        self.do_POST()

    def batch(self, body: str) -> None:
        parts = []
        for name in re.findall(r"DELETE /storage/v1/b/checkpoints/o/(\S+?)(?:\?\S*)? HTTP", body):
            status = "204 No Content" if OBJECTS.pop(unquote(name), None) is not None else "404 Not Found"
            parts.append(f"--batch\r\nContent-Type: application/http\r\n\r\nHTTP/1.1 {status}\r\n\r\n\r\n")
        self.say(200, ("".join(parts) + "--batch--").encode(), Content_Type="multipart/mixed; boundary=batch")

    def do_DELETE(self) -> None:
        found = re.fullmatch(r"/storage/v1/b/checkpoints/o/(.+)", urlsplit(self.path).path)
        with LOCK:
            if urlsplit(self.path).path.startswith("/resumable/"):
                UPLOADS.pop(self.path.rpartition("/")[2], None)
                return self.say(499)
            if found and OBJECTS.pop(unquote(found[1]), None) is not None:
                return self.say(204)
        return self.missing()


def main() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    for line in sys.stdin:
        match line.split():
            case ["throttled"]:
                print(STATE["throttled"], flush=True)
            case ["begun"]:
                print(len(UPLOADS), flush=True)
            case [what, *number]:
                STATE[what] = int(number[0]) if number else 1
