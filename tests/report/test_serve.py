"""A running job, followed."""

from __future__ import annotations

import http.client
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from klimb.errors import KlimbError
from klimb.report.serve import Server
from tests.browser import Open, until
from tests.report.folders import line, rows_of, sample, write_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", rows_of(20), [sample(i, row=i) for i in range(20)], episodes=6400)


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    with Server(folder, 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def get(server: Server, path: str, **headers: str) -> tuple[int, bytes, http.client.HTTPMessage]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body, answer.headers


def test_it_answers_this_machine_only(server: Server) -> None:
    assert server.server_address[0] == "127.0.0.1"
    for host in ("evil.example", f"evil.example:{server.server_port}", "127.0.0.1", "127.0.0.1.evil.example"):
        assert get(server, "/data.json", Host=host)[0] == 403
    for host in ("127.0.0.1", "localhost"):
        assert get(server, "/data.json", Host=f"{host}:{server.server_port}")[0] == 200
    assert get(server, "/config.yaml")[0] == 404
    assert get(server, "/../config.yaml")[0] == 404


def test_unchanged_data_is_not_sent_again(server: Server, folder: Path) -> None:
    status, body, headers = get(server, "/data.json")
    assert (status, json.loads(body)["state"]) == (200, "stopped")
    assert get(server, "/data.json", **{"If-None-Match": headers["ETag"]})[:2] == (304, b"")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(line({"step": 21, "episodes": 1344, "reward/mean": 0.9}))
    assert get(server, "/data.json", **{"If-None-Match": headers["ETag"]})[0] == 200


@pytest.mark.slow
def test_the_page_follows_and_leaves_the_reader_where_he_is(server: Server, folder: Path, open_page: Open) -> None:
    page = open_page(server.address)
    assert "connect-src 'self'" in page.locator("meta[http-equiv]").get_attribute("content")
    page.locator(".head").nth(3).click()
    key = page.evaluate("document.activeElement.dataset.key")
    page.locator("#samples").scroll_into_view_if_needed()
    page.evaluate("document.activeElement.scrollIntoView()")
    height = page.evaluate("scrollY")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(line(rows_of(21)[21] | {"eval/accuracy": 0.987}))
    with (folder / "samples.jsonl").open("a") as file:
        file.write(line(sample(21, row=99, response="brand new")))
    until(page, "document.getElementById('facts').textContent.includes('1,344 of 6,400')")
    assert "98.7%" in page.locator("#tiles").inner_text()
    until(page, "document.getElementById('list').textContent.includes('brand new')")
    assert page.evaluate("document.activeElement.dataset.key") == key
    assert page.locator(".row.open .head").get_attribute("data-key") == key
    assert page.evaluate("scrollY") == height
    page.evaluate("scrollTo(0, 0)")
    until(page, "document.querySelector('.plot').data[0].x.at(-1) === 21")
    assert page.locator("#pulse").inner_text() == "follows the run"


def test_a_run_that_goes_away_is_told(server: Server, folder: Path) -> None:
    shutil.rmtree(folder)
    status, body, _ = get(server, "/data.json")
    assert status == 503
    assert b"no such run folder" in body


def test_mistakes_are_told_before_anything_listens(server: Server, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(KlimbError, match="no such run folder"):
        Server(tmp_path / "nowhere", 0)
    with pytest.raises(KlimbError, match=r"--port .*cannot listen on 127.0.0.1"):
        Server(folder, server.server_port)
