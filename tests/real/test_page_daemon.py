"""The page while the daemon comes and goes, recovers, waits and asks for a token."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import structlog

from indexd.config import load
from indexd.serve.board import Board
from indexd.serve.server import ServeThread
from support.browser import CHROMIUM
from support.devtools import Browser
from support.page import BEGIN, TOPIC, Beside
from support.small_log import SEGMENT_SIZE

pytestmark = CHROMIUM

TOKEN = "0123456789abcdef"
STREAMS = 32
ROW = {
    "writtenAt": 1_700_000_000_000,
    "beginOffset": 2**53 + 1,
    "phyOffset": 2**53 + 3000,
    "durableOffset": 2**53 + 2001,
    "readOffset": 2**53 + 3500,
    "commitLogMinOffset": 2**53 + 501,
    "commitLogMaxOffset": 2**53 + 4003,
    "caughtUp": False,
    "dispatchBehindBytes": 1003,
    "dispatchBehindMilliseconds": 90_000,
    "messages": 12,
    "indexEntries": 40,
    "indexFiles": 1,
    "corruptBytes": 0,
    "uncovered": [[2**53 + 1001, 2**53 + 1101, "<b>expired</b>"]],
    "corrupt": {"offset": 2**53 + 3001, "reason": "<i>no magic</i>"},
    "problems": {"build": "cannot write <img src=x>: No space left on device"},
}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture
def beside(tmp_path: Path) -> Iterator[Beside]:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    beside = Beside(tmp_path, INDEXD_HTTP_TOKEN_FILE=str(token))
    for number in range(20):
        beside.write(TOPIC, f"order-{number}")
    yield beside
    if "not started" not in repr(beside.daemon):
        beside.daemon.kill()
    beside.writer.close()


def test_a_daemon_that_is_stopped_and_started_again(browser: Browser, tmp_path: Path) -> None:
    beside = Beside(tmp_path)
    beside.write(TOPIC, "order-1")
    beside.start()
    address = beside.address
    tab = browser.page()
    tab.open(address)
    tab.wait("document.querySelector('#link').dataset.link === 'live'")
    assert beside.daemon.terminate() == 0
    tab.wait("document.querySelector('#link').innerText.startsWith('stale: no answer for')")
    assert tab.eval("document.body.classList.contains('is-stale')")
    tab.type("#topic", TOPIC)
    tab.type("#q", "order-1")
    tab.press("Enter")
    tab.wait("document.querySelector('#answer').innerText.includes('The daemon does not answer')")
    assert "systemctl status" in tab.text("#answer")
    beside.write(TOPIC, "order-1")
    beside.start(urlsplit(address).netloc)
    try:
        tab.wait("document.querySelector('#link').dataset.link !== 'stale'")
        tab.wait("document.querySelector('#state').innerText.includes('2 messages')")
        assert not tab.eval("document.body.classList.contains('is-stale')")
        tab.eval("document.querySelector('#search').requestSubmit()")
        tab.wait("document.querySelectorAll('tr.hit').length === 2")
    finally:
        beside.daemon.kill()
        beside.writer.close()


def test_a_daemon_that_hangs_is_stale_too(browser: Browser, tmp_path: Path) -> None:
    beside = Beside(tmp_path)
    beside.write(TOPIC, "order-1")
    beside.start()
    tab = browser.page()
    tab.open(beside.address)
    tab.wait("document.querySelector('#link').dataset.link === 'live'")
    os.kill(beside.daemon.pid, 19)
    try:
        tab.wait("document.querySelector('#link').dataset.link === 'stale'")
        os.kill(beside.daemon.pid, 18)
        tab.wait("document.querySelector('#link').dataset.link !== 'stale'")
    finally:
        beside.daemon.kill()
        beside.writer.close()


def test_where_no_stream_is_to_be_had_it_asks_again_and_again(browser: Browser, tmp_path: Path) -> None:
    beside = Beside(tmp_path)
    beside.write(TOPIC, "order-1")
    beside.start()
    place = urlsplit(beside.address)
    try:
        with ExitStack() as stack:
            for _ in range(STREAMS):
                stream = stack.enter_context(socket.create_connection((str(place.hostname), int(place.port or 0))))
                stream.sendall(f"GET /api/v1/live HTTP/1.1\r\nHost: {place.netloc}\r\n\r\n".encode())
                assert stream.recv(1000).startswith(b"HTTP/1.1 200")
            tab = browser.page()
            tab.open(beside.address)
            tab.wait("document.querySelector('#link').dataset.link === 'polling'")
            beside.write(TOPIC, "order-2")
            tab.wait("document.querySelector('#state').innerText.includes('2 messages')")
        tab.wait("document.querySelector('#link').dataset.link === 'live'")
    finally:
        beside.daemon.kill()
        beside.writer.close()


def test_a_token_is_asked_for_and_stays_in_the_tab(browser: Browser, beside: Beside) -> None:
    beside.start()
    tab = browser.page()
    tab.open(beside.search("order-7"))
    tab.wait("document.querySelector('#token').hidden === false")
    assert not tab.eval("document.querySelectorAll('tr.hit').length")
    assert str(beside.daemon.store) not in tab.text()
    tab.type("#secret", "not the token")
    tab.press("Enter")
    tab.wait("document.querySelector('#token').hidden === false && document.querySelector('#secret').value === ''")
    tab.type("#secret", TOKEN)
    tab.press("Enter")
    tab.wait("document.querySelectorAll('tr.hit').length === 1")
    tab.wait("document.querySelector('#link').dataset.link === 'live'")
    assert tab.eval("document.querySelector('#token').hidden")
    assert str(beside.daemon.store) in tab.text("header")
    assert tab.eval("sessionStorage.getItem('token')") == TOKEN
    assert TOKEN not in str(tab.eval("location.href + JSON.stringify(localStorage) + document.cookie"))
    assert not [url for url in tab.requests if TOKEN in url]
    tab.open(beside.search("order-8"))
    tab.wait("document.querySelectorAll('tr.hit').length === 1")


def test_without_javascript_it_says_that_it_wants_a_token(browser: Browser, beside: Beside) -> None:
    beside.start()
    tab = browser.page(script=False)
    tab.open(beside.search("order-7"))
    html = tab.html()
    assert "This server wants a token" in html
    assert f"'{beside.address}api/v1/status'" in html
    assert "searching does not" not in html


def test_theme_and_zone_are_kept(browser: Browser, tmp_path: Path) -> None:
    beside = Beside(tmp_path)
    beside.write(TOPIC, "order-1")
    beside.start()
    try:
        tab = browser.page(dark=True)
        tab.call("Emulation.setTimezoneOverride", timezoneId="Asia/Shanghai")
        tab.open(beside.search("order-1"))
        tab.wait("document.documentElement.dataset.ready")
        assert tab.eval("getComputedStyle(document.body).backgroundColor") == "rgb(16, 20, 27)"
        utc = tab.text("tr.hit time")
        tab.click("#theme")
        tab.click("#zone")
        assert tab.eval("getComputedStyle(document.body).backgroundColor") == "rgb(246, 247, 249)"
        assert (int(tab.text("tr.hit time")[11:13]) - int(utc[11:13])) % 24 == 8
        tab.open(beside.address)
        tab.wait("document.documentElement.dataset.ready")
        assert tab.eval("document.documentElement.dataset.theme") == "light"
        tab.type("#topic", TOPIC)
        tab.type("#q", "order-1")
        tab.type("#from", "00:00")
        tab.press("Enter")
        tab.wait("location.search.includes('zone=%2B08%3A00')")
    finally:
        beside.daemon.kill()
        beside.writer.close()


@pytest.fixture
def board(tmp_path: Path) -> Iterator[Board]:
    """What is shown without a daemon behind it; ``board.http`` is where."""
    config = load({"store": str(tmp_path), "data": str(tmp_path / "data"), "http": "127.0.0.1:0"}, None, {})
    board = Board(config)
    with ServeThread(config, board, structlog.get_logger()):
        yield board


def test_a_recovery_is_drawn_and_searching_waits_for_it(browser: Browser, board: Board) -> None:
    board.recovering("replay", 3, 10)
    tab = browser.page()
    tab.open(f"http://{board.http}/")
    tab.wait("document.querySelector('#recovery').innerText.includes('3 of 10')")
    assert "Recovering, replay: 30 %" in tab.text("#state")
    assert tab.eval("document.querySelector('[role=progressbar]').getAttribute('aria-valuenow')") == "30"
    tab.type("#topic", TOPIC)
    tab.type("#q", "order-1")
    tab.press("Enter")
    tab.wait("document.querySelector('#answer').innerText.includes('The index is recovering')")
    assert "Search again in a moment" in tab.text("#answer")
    board.recovering("replay", 9, 10)
    tab.wait("document.querySelector('#recovery').innerText.includes('9 of 10')")
    board.running(lambda: dict(ROW))
    tab.wait("document.querySelector('#recovery').hidden")


def test_events_are_said_in_words_and_what_is_well_again_is_green(browser: Browser, board: Board) -> None:
    board.events.tell("degraded", {"stage": "build", "problem": "cannot write <b>x</b>", "retry_seconds": 1})
    board.events.tell("healed", {"stage": "build"})
    board.events.tell("rolled", {"files": 1, "phy_offset": 2**53 + 1})
    board.running(lambda: dict(ROW))
    tab = browser.page()
    tab.open(f"http://{board.http}/")
    assert tab.text("h1").startswith("indexd")
    tab.wait("document.querySelectorAll('#events li').length === 3")
    events = tab.text("#events")
    for words in ("build: cannot write <b>x</b>", "build goes on", "1 file, at offset 9,007,199,254,740,993"):
        assert words in events
    colours = tab.eval(
        "[...document.querySelectorAll('#events .kind')].map((one) => [one.innerText, getComputedStyle(one).color])"
    )
    good = tab.eval(
        "getComputedStyle(document.querySelector('.verdict.good')||Object.assign(document.body.appendChild("
        "document.createElement('p')), {className: 'verdict good'})).color"
    )
    assert [colour == good for _, colour in colours] == [False, True, False]
    assert [words for words, _ in colours] == ["Index file full", "Healed", "Waiting"]


def test_topics_are_completed_as_they_are_typed(browser: Browser, tmp_path: Path) -> None:
    beside = Beside(tmp_path)
    for topic in ("OrderPaid", "OrderCreated", "Stock"):
        beside.write(topic, "k")
    beside.start()
    tab = browser.page()
    tab.open(beside.address)
    tab.type("#topic", "orde")
    tab.wait("document.querySelectorAll('#topics option').length === 2")
    assert tab.eval("[...document.querySelectorAll('#topics option')].map((one) => one.value)") == [
        "OrderCreated",
        "OrderPaid",
    ]
    beside.daemon.kill()
    beside.writer.close()


def test_a_broker_that_is_down_is_a_figure_in_mode_shadow(browser: Browser, board: Board) -> None:
    board.running(lambda: ROW | {"corrupt": None, "problems": {}, "uncovered": []})
    board.broker = {"alive": False, "why": "its lock is free", "unsafe": []}
    tab = browser.page()
    tab.open(f"http://{board.http}/")
    tab.wait("document.querySelector('#tile-broker .value')?.innerText === 'not running'")
    assert tab.eval("document.querySelector('#tile-broker').className") == "tile"
    assert tab.text("#tile-broker .extra") == "its lock is free"
    assert tab.text("#problems") == ""


def test_what_is_wrong_stands_at_the_top_and_the_log_shows_where(browser: Browser, board: Board) -> None:
    board.running(lambda: ROW | {"mode": "offload"})
    board.broker = {"alive": False, "why": "<b>no lock</b>", "unsafe": ["<u>it indexes itself</u>"]}
    for script in (False, True):
        tab = browser.page(script=script)
        tab.open(f"http://{board.http}/")
        if script:
            tab.wait("document.querySelector('#log .part')")
        html = tab.html()
        for words in (
            "No space left",
            "&lt;i&gt;no magic",
            "100 bytes",
            "&lt;b&gt;no lock",
            "&lt;u&gt;it indexes itself",
        ):
            assert words in html
        assert "<img" not in html
    kinds: Any = tab.eval("[...document.querySelectorAll('#log .part')].map(part => part.classList[1])")
    assert kinds == ["expired", "durable", "indexed", "waiting", "hole"]
    assert "Indexing waits (build)" in tab.text("#state")
    legend = tab.text("#log")
    for offset in (2**53 + 501, 2**53 + 2001, 2**53 + 4003, 2**53 + 1101):
        assert f"{offset:,}" in legend
    assert tab.eval("document.querySelector('#tile-lag').className") == "tile bad"
    assert tab.eval("document.querySelector('#tile-broker').className") == "tile bad"
    assert [words for words in tab.complaints if "status of 503" not in words] == []


def test_a_key_whose_messages_have_expired_says_so(browser: Browser, tmp_path: Path) -> None:
    beside = Beside(tmp_path)
    beside.write(TOPIC, "old")
    while beside.writer.max_offset < BEGIN + SEGMENT_SIZE:
        beside.write(TOPIC, "filling", body="x" * 2000)
    beside.start()
    try:
        min((beside.daemon.store / "commitlog").iterdir()).unlink()
        beside.daemon.wait_state(lambda row: bool(row["commitLogMinOffset"] > BEGIN))
        tab = browser.page()
        tab.open(beside.search("old"))
        assert "Expired: the index knew entries" in tab.text("#answer")
        assert f"The log begins at {BEGIN + SEGMENT_SIZE:,}" in tab.text("#answer")
        assert tab.eval("document.querySelectorAll('#answer .part.expired').length") == 1
    finally:
        beside.daemon.kill()
        beside.writer.close()
