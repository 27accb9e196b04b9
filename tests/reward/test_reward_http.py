"""The HTTP reward against a real server in a thread."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from reward_samples import make_sample

from klimb.reward.http import HttpReward


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    seen: list[tuple[str, dict[str, Any]]] = []  # noqa: RUF012
    drops: list[int] = []  # noqa: RUF012

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.seen.append((self.path, body))
        n = len(body["prompts"])
        if self.path == "/drop" or (self.path == "/drop-once" and not self.drops):
            self.drops.append(1)
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
        elif self.path == "/redirect":
            self.send_response(307)
            self.send_header("location", "/lengths")
            self.send_header("content-length", "0")
            self.end_headers()
        elif self.path == "/slow":
            time.sleep(1.5)
            self.close_connection = True
        elif self.path == "/drip":
            self.drip()
        else:
            lengths = {"rewards": [float(len(text)) for text in body["responses"]]}
            replies: dict[str, tuple[int, Any]] = {
                "/lengths": (200, lengths),
                "/drop-once": (200, lengths),
                "/mixed": (200, {"rewards": [None, float("nan"), "1", True, 10**400][:n]}),
                "/short": (200, {"rewards": [1.0] * (n - 1)}),
                "/list": (200, [1.0] * n),
                "/broken": (500, {"error": "no"}),
            }
            self.reply(*replies[self.path])

    def reply(self, status: int, value: Any) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def drip(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "1000")
        self.end_headers()
        try:
            for _ in range(30):
                self.wfile.write(b" ")
                self.wfile.flush()
                time.sleep(0.1)
        except OSError:
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        return None


@pytest.fixture
def server() -> Iterator[str]:
    Handler.seen.clear()
    Handler.drops.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def ask(url: str, texts: list[str], timeout: float = 5.0, batch_size: int = 64) -> list[Any]:
    reward = HttpReward(url, name="http", weight=1.0, batch_size=batch_size, timeout_seconds=timeout)
    got = reward.score([make_sample(text, prompt="Q", answer=text or None) for text in texts])
    reward.close()
    return got


def test_rows_go_out_in_chunks_and_come_back_in_order(server: str) -> None:
    got = ask(f"{server}/lengths", ["a", "", "ccc", "dddd", "\ud800"], batch_size=2)
    assert [o.value for o in got] == [1.0, 0.0, 3.0, 4.0, 1.0]
    assert [len(body["responses"]) for _, body in Handler.seen] == [2, 2, 1]
    assert Handler.seen[0][1] == {"prompts": ["Q", "Q"], "responses": ["a", ""], "answers": ["a", None]}


def test_null_abstains_and_odd_values_fail_their_row_only(server: str) -> None:
    got = ask(f"{server}/mixed", ["a"] * 5)
    assert got[0].value is None
    assert got[0].failure is None
    assert [o.failure.kind for o in got[1:]] == ["non_finite", "error", "error", "non_finite"]


@pytest.mark.parametrize(
    ("path", "detail"),
    [
        ("/short", "2 rewards for 3 rows"),
        ("/list", '{"rewards": [...]}'),
        ("/broken", "status 500"),
        ("/redirect", "status 307"),
    ],
)
def test_a_bad_reply_fails_the_chunk_with_its_reason(server: str, path: str, detail: str) -> None:
    got = ask(f"{server}{path}", ["a"] * 3)
    assert {o.failure.kind for o in got} == {"error"}
    assert detail in got[0].failure.detail
    assert len(Handler.seen) == 1, "neither a redirect nor a second try"


@pytest.mark.parametrize("path", ["/slow", "/drip"])
def test_a_slow_server_is_a_timeout(server: str, path: str) -> None:
    start = time.perf_counter()
    got = ask(f"{server}{path}", ["a"] * 2, timeout=0.5)
    assert time.perf_counter() - start < 2.5
    assert [o.failure.kind for o in got] == ["timeout", "timeout"]
    assert len(Handler.seen) == 1


def test_one_more_try_after_a_dropped_connection(server: str) -> None:
    assert [o.value for o in ask(f"{server}/drop-once", ["abc"])] == [3.0]
    assert len(Handler.seen) == 2
    got = ask(f"{server}/drop", ["abc"])
    assert got[0].failure.kind == "error"
    assert len(Handler.seen) == 4, "two tries, not three"


def test_no_server_is_an_error_that_names_the_address() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        got = ask(url, ["a"], timeout=2.0)
    assert got[0].failure.kind == "error"
    assert url in got[0].failure.detail
