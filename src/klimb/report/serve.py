"""The report of a running job, followed by the page itself. Listens on this machine only."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from klimb.errors import KlimbError
from klimb.report.files import fingerprint, read_run
from klimb.report.page import build_data, build_page, plotly_source, to_json

HOST = "127.0.0.1"


class Source:
    """The page and its data, made anew only when the run's files have changed."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._lock = folder, threading.Lock()
        self._seen: object = None
        self._data, self._tag = b"", ""

    def page(self) -> bytes:
        return build_page(read_run(self._folder), live=True).encode()

    def data(self) -> tuple[bytes, str]:
        """JSON and its tag."""
        with self._lock:
            now = fingerprint(self._folder)
            if now != self._seen:
                self._data = to_json(build_data(read_run(self._folder))).encode()
                self._tag = f'"{hashlib.sha256(self._data).hexdigest()[:24]}"'
                self._seen = now
            return self._data, self._tag


class Server(ThreadingHTTPServer):
    """port 0: any free one; `address` says which."""

    daemon_threads = True

    def __init__(self, folder: Path, port: int) -> None:
        self.source = Source(folder)
        plotly_source()
        self.source.data()  # what is missing is told here, not in the browser
        try:
            super().__init__((HOST, port), Handler)
        except (OSError, OverflowError) as error:
            raise KlimbError(f"--port {port}: cannot listen on {HOST}: {error}; --port 0 takes a free one") from None

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_port}/"


class Handler(BaseHTTPRequestHandler):
    """Two places: the page and its data."""

    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        # A foreign site could point a name of its own at this machine and read the answers; its name gives it away.
        allowed = {f"{name}:{self.server.server_port}" for name in (HOST, "localhost")}
        if self.headers.get("Host") not in allowed:
            self._send(403, b"klimb report answers to 127.0.0.1 and localhost only", "text/plain")
        elif self.path == "/":
            self._answer(lambda: self._send(200, self.server.source.page(), "text/html"))
        elif self.path == "/data.json":
            self._answer(self._send_data)
        else:
            self._send(404, b"not here", "text/plain")

    def _answer(self, send: Callable[[], None]) -> None:
        try:
            send()
        except KlimbError as error:
            self._send(503, str(error).encode(errors="replace"), "text/plain")
        except OSError:
            self.close_connection = True  # the reader went away, or a file went while it was read; it asks again

    def _send_data(self) -> None:
        body, tag = self.server.source.data()
        if self.headers.get("If-None-Match") == tag:
            self._send(304, b"", "application/json", tag)
        else:
            self._send(200, body, "application/json", tag)

    def _send(self, status: int, body: bytes, kind: str, tag: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        if tag:
            self.send_header("ETag", tag)
        self.end_headers()
        if status != 304:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """The terminal stays quiet."""
