"""A hub on the loopback interface that serves model folders with ranges and counts the bytes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
NOBODY = "http://127.0.0.1:9"


@dataclass
class Repository:
    """Files by name; ``sent`` is file -> bytes of bodies, ``requests`` counts them."""

    files: dict[str, bytes]
    sent: dict[str, int] = field(default_factory=dict)
    requests: int = 0


class Hub:
    """The server, and what it was asked for."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.ranges = True
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: Any) -> None:
                pass

            def do_HEAD(self) -> None:
                hub.answer(self)

            def do_GET(self) -> None:
                hub.answer(self)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_address[1]}"

    def add(self, name: str, folder: Path) -> Repository:
        """Serve a folder as a repository."""
        files = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
        self.repositories[name] = Repository(files)
        return self.repositories[name]

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        path = handler.path.partition("?")[0]
        match = re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/([^/]+))?", path)
        if match is not None:
            self._answer_info(handler, match[1], match[3])
            return
        match = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if match is None or match[1] not in self.repositories:
            send(handler, 404, b"{}", {})
            return
        repository, name = self.repositories[match[1]], match[3]
        data = repository.files.get(name)
        if data is None:
            send(handler, 404, b"{}", {"X-Error-Code": "EntryNotFound"})
            return
        head = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
        status = 200
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", handler.headers.get("Range", ""))
        if asked is not None and self.ranges:
            start, end = int(asked[1]), int(asked[2]) + 1
            if start >= len(data):
                send(handler, 416, b"", {"Content-Range": f"bytes */{len(data)}"})
                return
            head["Content-Range"] = f"bytes {start}-{min(end, len(data)) - 1}/{len(data)}"
            data, status = data[start:end], 206
        if handler.command == "GET":
            repository.requests += 1
            repository.sent[name] = repository.sent.get(name, 0) + len(data)
        send(handler, status, data, head)

    def _answer_info(
        self, handler: BaseHTTPRequestHandler, name: str, revision: str | None
    ) -> None:
        if name not in self.repositories:
            send(handler, 404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif revision not in (None, "main", "v1", COMMIT):
            send(handler, 404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        else:
            siblings = [{"rfilename": file} for file in self.repositories[name].files]
            body = {"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings}
            send(handler, 200, json.dumps(body).encode(), {})


def send(
    handler: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str]
) -> None:
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body)))
    for key, value in headers.items():
        handler.send_header(key, value)
    handler.end_headers()
    if handler.command != "HEAD":
        # a client that has enough goes away
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            handler.wfile.write(body)


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub()
    threading.Thread(target=hub.server.serve_forever, daemon=True).start()
    yield hub
    hub.server.shutdown()
    hub.server.server_close()


@dataclass(frozen=True)
class Answer:
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.out)


@pytest.fixture
def ask(tmp_path: Path):
    """Run a command in a process of its own: the hub's client reads its settings at import."""

    def run(module: str, *arguments: str, endpoint: str = NOBODY, offline: bool = False) -> Answer:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
        environment |= {
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(tmp_path / "hf"),
            "NO_PROXY": "127.0.0.1",
            "PYTHONPATH": str(SOURCE),
        }
        if offline:
            environment["HF_HUB_OFFLINE"] = "1"
        command = [sys.executable, "-m", f"turboquant_mlx.{module}", *arguments]
        done = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120
        )
        assert "Traceback" not in done.stderr, done.stderr
        return Answer(done.returncode, done.stdout, done.stderr)

    return run
