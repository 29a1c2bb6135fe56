"""A stand-in of what Hugging Face's packages speak over HTTP: branches, commits, large files, reading.

It has the port of its argument, prints its URL and serves until its standard input ends. One repository, user/model.
The line "conflict N" answers the next N commits "412 Precondition Failed", "die" ends the process in the middle of the
next large file; "branches" prints them with their files, "begun" how many are those of uploads.
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

LFS_FROM = 10 << 10  # bytes
README = {"README.md": b"---\nlicense: mit\n---\n", "model.safetensors": b"of another model"}


class State:
    """What the service has."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.branches: dict[str, dict[str, bytes]] = {"main": dict(README)}
        self.heads = {"main": 1}
        self.objects: dict[str, bytes] = {}  # large files, by SHA-256
        self.conflicts = 0
        self.dies = False

    def touch(self, branch: str) -> str:
        self.heads[branch] = max(self.heads.values()) + 1
        return self.sha(branch)

    def sha(self, branch: str) -> str:
        return hashlib.sha1(f"{branch} {self.heads[branch]}".encode()).hexdigest()


STATE = State()


def info(path: str, data: bytes) -> dict[str, Any]:
    blob = hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()
    found: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": blob}
    if len(data) >= LFS_FROM:
        found["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
    return found


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    # --- answers --------------------------------------------------------------------------------------
    def say(self, status: int, content: Any = None, **headers: str) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content if content is not None else {}).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", headers.get("Content_Length", str(len(data))))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def missing(self, code: str) -> None:
        self.say(404, {"error": code}, X_Error_Code=code)

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        with STATE.lock:
            if path == "/api/models/user/model/refs":
                branches = [
                    {"name": name, "ref": f"refs/heads/{name}", "targetCommit": STATE.sha(name)}
                    for name in STATE.branches
                ]
                return self.say(200, {"branches": branches, "tags": [], "converts": []})
            if found := re.fullmatch(r"/api/models/user/model(?:/revision/([^/]+))?", path):
                return self.revision(unquote(found[1] or "main"), lambda branch: self.repository(branch))
            if found := re.fullmatch(r"/api/models/user/model/tree/([^/]+)(?:/(.*))?", path):
                below = unquote(found[2] or "")
                return self.revision(unquote(found[1]), lambda branch: self.tree(branch, below))
            if found := re.fullmatch(r"/user/model/resolve/([^/]+)/(.+)", path):
                name = unquote(found[2])
                return self.revision(unquote(found[1]), lambda branch: self.file(branch, name))
        return self.missing("RepoNotFound")

    def revision(self, name: str, then: Any) -> None:
        for branch in STATE.branches:
            if name in (branch, STATE.sha(branch)):
                return then(branch)
        return self.missing("RevisionNotFound")

    def repository(self, branch: str) -> None:
        files = [{"rfilename": name} for name in STATE.branches[branch]]
        self.say(200, {"id": "user/model", "modelId": "user/model", "sha": STATE.sha(branch), "siblings": files,
                       "private": False, "downloads": 0, "likes": 0, "tags": []})  # fmt: skip

    def tree(self, branch: str, below: str) -> None:
        files = STATE.branches[branch].items()
        self.say(200, [info(path, data) for path, data in files if not below or path.startswith(f"{below}/")])

    def file(self, branch: str, name: str) -> None:
        data = STATE.branches[branch].get(name)
        if data is None:
            return self.missing("EntryNotFound")
        about = info(name, data)
        headers = {"X_Repo_Commit": STATE.sha(branch), "ETag": f'"{about.get("lfs", about)["oid"]}"',
                   "X_Linked_Size": str(len(data)), "Accept_Ranges": "bytes"}  # fmt: skip
        if found := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(found[1]), int(found[2] or len(data) - 1)
            headers["Content_Range"] = f"bytes {first}-{last}/{len(data)}"
            return self.say(206, data[first : last + 1], **headers)
        if self.command == "HEAD":
            return self.say(200, b"", **headers, Content_Length=str(len(data)))
        return self.say(200, data, **headers)

    # --- changes --------------------------------------------------------------------------------------
    def do_POST(self) -> None:
        path, body = urlsplit(self.path).path, self.body()
        with STATE.lock:
            if found := re.fullmatch(r"/api/models/user/model/branch/([^/]+)", path):
                name = unquote(found[1])
                if name in STATE.branches:
                    return self.say(409, {"error": "Reference already exists"})
                start = json.loads(body or b"{}").get("startingPoint", "main")
                if start not in STATE.branches:
                    return self.missing("RevisionNotFound")
                STATE.branches[name] = dict(STATE.branches[start])
                STATE.touch(name)
                return self.say(200)
            if re.fullmatch(r"/api/models/user/model/preupload/([^/]+)", path):
                files = [
                    {"path": each["path"], "uploadMode": "lfs" if each["size"] >= LFS_FROM else "regular",
                     "shouldIgnore": False}
                    for each in json.loads(body)["files"]
                ]  # fmt: skip
                return self.say(200, {"files": files})
            if path == "/user/model.git/info/lfs/objects/batch":
                return self.say(
                    200, {"transfer": "basic", "objects": list(map(self.batch, json.loads(body)["objects"]))}
                )
            if found := re.fullmatch(r"/api/models/user/model/paths-info/([^/]+)", path):
                names = parse_qs(body.decode())["paths"]
                return self.revision(unquote(found[1]), lambda branch: self.say(200, [
                    info(name, STATE.branches[branch][name]) for name in names if name in STATE.branches[branch]
                ]))  # fmt: skip
            if found := re.fullmatch(r"/api/models/user/model/commit/([^/]+)", path):
                return self.revision(unquote(found[1]), lambda branch: self.commit(branch, body))
            if path == "/api/validate-yaml":
                return self.say(200, {"errors": [], "warnings": []})
        return self.missing("RepoNotFound")

    def batch(self, each: dict[str, Any]) -> dict[str, Any]:
        if each["oid"] in STATE.objects:
            return each
        host = self.headers["Host"]
        return {**each, "actions": {"upload": {"href": f"http://{host}/lfs/{each['oid']}", "header": {}}}}

    def commit(self, branch: str, body: bytes) -> None:
        if STATE.conflicts:
            STATE.conflicts -= 1
            return self.say(412, {"error": "A commit has happened since"})
        files = STATE.branches[branch]
        for line in body.splitlines():
            item = json.loads(line)
            value = item["value"]
            match item["key"]:
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    files[value["path"]] = STATE.objects[value["oid"]]
                case "deletedFile":
                    if value["path"] not in files:
                        return self.missing("EntryNotFound")
                    del files[value["path"]]
        sha = STATE.touch(branch)
        return self.say(200, {"commitUrl": f"http://{self.headers['Host']}/user/model/commit/{sha}", "commitOid": sha})

    def do_PUT(self) -> None:
        if STATE.dies:
            self.rfile.read(1000)
            os._exit(9)
        data, oid = self.body(), self.path.rpartition("/")[2]
        with STATE.lock:
            if hashlib.sha256(data).hexdigest() != oid:
                return self.say(400, {"error": "checksum mismatch"})
            STATE.objects[oid] = data
        return self.say(200)

    def do_DELETE(self) -> None:
        found = re.fullmatch(r"/api/models/user/model/branch/([^/]+)", urlsplit(self.path).path)
        with STATE.lock:
            if found and STATE.branches.pop(unquote(found[1]), None) is not None:
                return self.say(200)
        return self.missing("RevisionNotFound")


def main() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    for line in sys.stdin:
        match line.split():
            case ["conflict", number]:
                STATE.conflicts = int(number)
            case ["die"]:
                STATE.dies = True
            case ["branches"]:
                print(json.dumps({name: sorted(files) for name, files in STATE.branches.items()}), flush=True)
            case ["begun"]:
                print(sum(name.startswith("upload/") for name in STATE.branches), flush=True)
