"""A Hugging Face hub on this machine: repositories in memory, the part of the API that huggingface_hub uses, faults.

As on the hub, large files (LFS) are redirected to a store with another host name, and all others are sent directly.
"""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

PAGE = 3
"""Files in one page of a listing; the hub has 1,000."""


@dataclass
class Fault:
    """What goes wrong with a request."""

    status: int = 0
    """Answer with this status."""
    code: str = ""
    """X-Error-Code."""
    cut_at: int | None = None
    """Close the connection after so many bytes of the file."""
    content: bytes | None = None
    """Send this in place of the file."""
    ignores_range: bool = False
    """Send the whole file, whatever part was requested."""
    body: bytes | None = None
    """Answer the API with this text."""
    holds_at: int | None = None
    """Send so many bytes of the file, then nothing until `Hub.released` is set."""
    times: int = 1_000_000
    """How many requests go wrong."""


@dataclass
class Repo:
    """A repository: its newest commit, and older ones."""

    files: Mapping[str, bytes]
    gated: bool = False
    lfs_from: int = 1 << 20
    """Size in bytes from which files are in LFS."""
    older: "tuple[Repo, ...]" = ()

    @cached_property
    def sha(self) -> str:
        content = b"".join(name.encode() + data for name, data in sorted(self.files.items()))
        return hashlib.sha1(content).hexdigest()

    @cached_property
    def entries(self) -> dict[str, dict[str, Any]]:
        """Each file as the tree lists it."""
        return {path: _entry(path, data, self.lfs_from) for path, data in sorted(self.files.items())}

    def at(self, revision: str) -> "Repo | None":
        """Return the commit of a revision; None if there is none."""
        return {"main": self, self.sha: self, **{repo.sha: repo for repo in self.older}}.get(revision)


@dataclass
class Hub:
    """The hub's repositories by (models|datasets)/ORG/NAME, its faults, and its requests."""

    repos: dict[str, Repo] = field(default_factory=dict)
    faults: dict[str, Fault] = field(default_factory=dict)
    """By file path; "info" and "tree" for the API."""
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    """Method, path and headers (names in lower case) of each request."""
    sent_bytes: dict[str, int] = field(default_factory=dict)
    """Of each file's content."""
    released: threading.Event = field(default_factory=threading.Event)
    holding: threading.Event = field(default_factory=threading.Event)
    """Set while a request is held."""
    port: int = 0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def store(self) -> str:
        """The store of large files: another host name than the endpoint's."""
        return f"http://localhost:{self.port}/store"

    def fault(self, key: str) -> Fault | None:
        fault = self.faults.get(key)
        if fault is None or fault.times < 1:
            return None
        fault.times -= 1
        return fault


@contextmanager
def serving() -> Iterator[Hub]:
    """Run a hub until the block ends."""
    hub = Hub()

    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = _Server(("127.0.0.1", 0), Handler)
    hub.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        hub.released.set()
        server.shutdown()
        thread.join()
        server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *ignored: object) -> None:
        """Print nothing: a client that stops reading is part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *ignored: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        address = urlsplit(self.path)
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.hub.requests.append((self.command, self.path, headers))
        parts = unquote(address.path).strip("/").split("/")
        if parts[0] == "api":
            self._api(parts[1:], parse_qs(address.query))
        elif parts[0] == "store":
            self._store("/".join(parts[1:4]), "/".join(parts[4:]))
        else:
            key = parts[:3] if parts[0] == "datasets" else ["models", *parts[:2]]
            rest = parts[3:] if parts[0] == "datasets" else parts[2:]
            self._resolve("/".join(key), rest[1], "/".join(rest[2:]))

    def _api(self, parts: list[str], query: dict[str, list[str]]) -> None:
        name, rest = "/".join(parts[:3]), parts[3:]
        kind = "tree" if rest[:1] == ["tree"] else "info"
        fault = self.hub.fault(kind)
        if fault is not None and fault.status:
            return self._fail(fault.status, fault.code)
        if fault is not None and fault.body is not None:
            return self._send(200, fault.body, {"Content-Type": "text/html"})
        repo = self.hub.repos.get(name)
        if repo is None:
            return self._fail(401, "RepoNotFound", "Invalid username or password.")
        repo = repo.at(rest[1] if rest else "main")
        if repo is None:
            return self._fail(404, "RevisionNotFound", f"Invalid rev id: {rest[1]}")
        if kind == "info":
            siblings = [{"rfilename": path} for path in repo.files]
            content = {"id": "/".join(parts[1:3]), "sha": repo.sha, "private": False, "siblings": siblings}
            return self._json({**content, "gated": "manual" if repo.gated else False})
        entries = list(repo.entries.values())
        start = int(query.get("cursor", ["0"])[0])
        links = {}
        if start + PAGE < len(entries):
            links["Link"] = (
                f'<{self.hub.endpoint}{urlsplit(self.path).path}?recursive=True&cursor={start + PAGE}>; rel="next"'
            )
        return self._json(entries[start : start + PAGE], links)

    def _resolve(self, name: str, revision: str, path: str) -> None:
        repo = self.hub.repos.get(name)
        repo = repo and repo.at(revision)
        if repo is None:
            return self._fail(404, "RevisionNotFound" if name in self.hub.repos else "RepoNotFound")
        if repo.gated and self.headers.get("Authorization") != "Bearer granted":
            return self._fail(
                401 if self.headers.get("Authorization") is None else 403, "GatedRepo", "Access restricted"
            )
        if path not in repo.files:
            return self._fail(404, "EntryNotFound")
        entry = repo.entries[path]
        lfs = entry.get("lfs")
        etag = lfs["oid"] if lfs else entry["oid"]
        headers = {"X-Repo-Commit": repo.sha, "ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
        if lfs:
            headers |= {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(entry["size"])}
            return self._send(302, b"", {**headers, "Location": f"{self.hub.store}/{name}/{path}"})
        return self._content(path, repo.files[path], headers)

    def _store(self, name: str, path: str) -> None:
        self._content(path, self.hub.repos[name].files[path], {"Accept-Ranges": "bytes"})

    def _content(self, path: str, data: bytes, headers: dict[str, str]) -> None:
        fault = self.hub.fault(path) if self.command == "GET" else None
        if fault is not None and fault.status:
            return self._fail(fault.status, fault.code)
        if fault is not None and fault.content is not None:
            data = fault.content
        begin, status = 0, 200
        if wanted := self.headers.get("Range"):
            begin, status = int(wanted.removeprefix("bytes=").rstrip("-")), 206
            if begin >= len(data):
                return self._fail(416)
            if fault is not None and fault.ignores_range:
                begin, status = 0, 200
        if status == 206:
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(data) - begin)}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return None
        end = len(data) if fault is None or fault.cut_at is None else max(begin, fault.cut_at)
        if fault is not None and fault.holds_at is not None:
            end = max(begin, fault.holds_at)
        self.wfile.write(data[begin:end])
        self.wfile.flush()
        self.hub.sent_bytes[path] = self.hub.sent_bytes.get(path, 0) + end - begin
        if fault is not None and fault.holds_at is not None:
            self.hub.holding.set()
            self.hub.released.wait(120)
        if end < len(data):
            self.close_connection = True
            self.connection.close()
        return None

    def _fail(self, status: int, code: str = "", message: str = "") -> None:
        names = {"X-Error-Code": code, "X-Error-Message": message}
        self._send(status, b"", {name: text for name, text in names.items() if text})

    def _json(self, content: Any, headers: dict[str, str] | None = None) -> None:
        self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json", **(headers or {})})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _entry(path: str, data: bytes, lfs_from: int) -> dict[str, Any]:
    """Return a file as the tree lists it."""
    git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    entry: dict[str, Any] = {"type": "file", "oid": git, "size": len(data), "path": path}
    if len(data) >= lfs_from:
        digest = hashlib.sha256(data).hexdigest()
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{digest}\nsize {len(data)}\n".encode()
        entry["oid"] = hashlib.sha1(b"blob %d\0" % len(pointer) + pointer).hexdigest()
        entry["lfs"] = {"oid": digest, "size": len(data), "pointerSize": len(pointer)}
    return entry
