"""Status page in a real browser, with a real server."""

from __future__ import annotations

import json
import random
import re
import threading
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest
from selenium.webdriver.common.keys import Keys

from hicache_metadata_server.dashboard.assets import read_assets
from hicache_metadata_server.protocol import (
    Drain,
    Draining,
    Inspect,
    Inspected,
    LookedUp,
    Lookup,
    LookupScope,
    Scopes,
)
from tests.metadata_server.browser import browser
from tests.metadata_server.servers import SERVE, served
from tests.metadata_server.token_files import write_tokens
from tests.support.metadata import V2Scope

pytestmark = pytest.mark.slow(seconds=57)

LASTING = f"{SERVE} --store sqlite:///{{tmp}}/m.db --quarantine-seconds 900 --lease-seconds 600"
SLOTS = 130
ODD = 'a/b?c#d%2F "<img src=x onerror=alert(1)>" é'
SCOPE = "0:kv-1f0c9a3b"
MODEL = "org/<b>model</b>"
TABLE = ".scopes tbody tr"
ROWS = ".slots tbody tr"
NONE = "\N{EN DASH}"


@pytest.fixture(scope="module")
def driver():
    with browser() as driver:
        yield driver


@pytest.fixture
def page(driver):
    """The browser; in the end nothing has gone wrong that a test did not name in `expected`."""
    driver.expected = []
    driver.complaints()
    driver.requests()
    driver.operations.clear()
    yield driver
    driver.driver.get("about:blank")
    complaints = [
        said
        for said in driver.complaints()
        if not any(expected in said for expected in driver.expected)
    ]
    assert complaints == []
    driver.requests()
    origins = {
        f"{parts.scheme}://{parts.netloc}"
        for parts in map(urlsplit, driver.operations)
        if parts.scheme != "about"
    }
    assert len(origins) == 1, "one server, and nobody else"


@pytest.fixture(scope="module")
def server():
    """With forty small scopes, and one whose slots are in every state."""
    with served(LASTING) as (place, client):
        for number in range(1, 40):
            V2Scope(
                client, f"{number}:mamba-1f0c9a3b", 10 * number, 1 << 20, random.Random(1)
            ).initialize()
        scope = V2Scope(client, SCOPE, SLOTS, 4096, random.Random(1))
        scope.initialize()
        client.http.post("/v2/describe", {"scope": SCOPE, "model": MODEL})
        keys = [ODD, *(f"page-{i:03}" for i in range(99))]
        leased = scope.reserve(keys, ["", *keys[:-1]])
        sums = [2**64 - 1, *range(2**63, 2**63 + 99)]
        assert all(scope.commit(leased.leases, [4096 - i for i in range(100)], sums))
        scope.reserve([f"writing-{i}" for i in range(5)])
        scope.delete(keys[-7:])
        scope.lookup([*keys[:3], "absent"], pin_seconds=60.0)
        yield place, client


def scopes(client):
    return {status.scope: status for status in client.call("/v2/scopes", None, Scopes).scopes}


def inspected(client, **asked):
    return client.call("/v2/inspect", Inspect(scope=SCOPE, **asked), Inspected).slots


def test_figures_are_those_of_the_api(page, server):
    place, client = server
    page.open(place.url)
    page.shows(".health", "Ready")
    about = page.facts()
    assert about["Instance"] == page.run(
        "return fetch('/v2').then((answer) => answer.json()).then((about) => about.instance)"
    )
    assert (about["Durability"], about["Leases last"], about["Quarantine"]) == (
        "process",
        "600 s",
        "900 s",
    )
    page.until(lambda: page.all(TABLE))
    shown = {row[0]: row[2:7] for row in table(page)}
    status = scopes(client)[SCOPE]
    assert (status.live, status.leased, status.quarantined, status.free) == (93, 5, 7, 25)
    assert shown[SCOPE] == ["130", "93", "5", "7", "25"]
    assert len(shown) == 25
    assert not page.all(f"{TABLE} td.shared")[0].is_displayed(), "no other server is there"
    assert {row[0]: row[1] for row in table(page) if row[1]} == {SCOPE: MODEL}
    every = scopes(client).values()
    assert page.texts(".states b") == [
        f"{sum(getattr(one, state) for one in every):,}"
        for state in ("live", "leased", "quarantined", "free")
    ]
    widths = page.run(
        "return [...document.querySelectorAll(arguments[0])].map((part) => "
        "part.getBoundingClientRect().width)",
        ".card > .bar > *",
    )
    whole = page.run("return document.querySelector('.card > .bar').getBoundingClientRect().width")
    all_slots = sum(one.slots for one in every)
    shares = [
        sum(getattr(one, state) for one in every) / all_slots
        for state in ("live", "leased", "quarantined")
    ]
    assert widths == [pytest.approx(max(2, share * whole), abs=1) for share in shares]


def test_the_overview_names_the_fullest_scope(page, server):
    """All together are nearly empty here; one scope is not."""
    place, client = server
    page.open(place.url)
    page.shows(".fullest", "Fullest scope:")
    most = max(scopes(client).values(), key=lambda one: (one.slots - one.free) / one.slots)
    assert most.scope == SCOPE
    used = most.slots - most.free
    page.shows(
        ".fullest",
        f"Fullest scope: {SCOPE}, {100 * used / most.slots:.1f}% of {most.slots} slots in use",
    )
    page.click(".fullest a")
    page.shows("h1", SCOPE)


def table(page):
    return page.run(
        "return [...document.querySelectorAll(arguments[0])].map((row) => "
        "[...row.cells].map((cell) => cell.textContent))",
        TABLE,
    )


def test_from_the_list_through_a_scope_to_a_key(page, server):
    place, client = server
    page.open(place.url)
    page.click("a", SCOPE)
    page.shows("h1", SCOPE)
    facts = page.facts()
    assert (facts["Slots"], facts["Bytes of a slot"], facts["All of it"]) == (
        "130",
        "4,096 (4 KiB)",
        "520 KiB",
    )
    assert (facts["Identity"], facts["Geometry"], facts["Hit ratio"]) == (
        "cf-identity",
        "page_first",
        "75.0% of 4 keys",
    )
    assert facts["Model"] == MODEL
    page.until(lambda: len(page.all(ROWS)) == 50)
    page.click(".slots a", "page-007")
    page.shows("h1", "page-007")
    page.until(lambda: "Checksum" in page.texts("dt"))
    (slot,) = inspected(client, keys=["page-007"])
    facts = page.facts()
    assert facts["State"].startswith("live")
    assert facts["Slot"].startswith(str(slot.slot))
    assert facts["Checksum"] == f"{slot.checksum:#018x} {slot.checksum}"
    assert facts["Length"].startswith("4,088 bytes")
    assert (facts["Generation"], facts["Pins"], facts["Key before it"]) == (
        str(slot.generation),
        "none",
        "page-006",
    )
    assert facts["In the file"] == f"bytes {4096 * slot.slot:,} to {4096 * (slot.slot + 1) - 1:,}"
    page.click("dd a", "page-006")
    page.shows("h1", "page-006")
    page.driver.back()
    page.shows("h1", "page-007")
    page.click(".crumbs a", "Overview")
    page.until(lambda: page.all(TABLE))


@pytest.mark.long
def test_a_key_is_found_whatever_it_is_made_of(page, server):
    place, client = server
    # The fixture's pin has ended where the tests before took longer than a pin may last.
    again = Lookup(scopes=[LookupScope(scope=SCOPE, keys=[ODD])], pin_seconds=60.0)
    client.call("/v2/lookup", again, LookedUp)
    page.open(f"{place.url}/#/scope/{SCOPE}")
    page.enter("#key", ODD + Keys.ENTER)
    page.shows("h1", ODD)
    page.until(lambda: page.facts().get("State", "").startswith("live"))
    facts = page.facts()
    assert facts["Checksum"] == "0xffffffffffffffff 18446744073709551615"
    assert facts["Pins"].startswith(("1:", "2:"))
    # The address can be given to somebody else.
    address = page.run("return location.href")
    page.open(address)
    page.until(lambda: page.facts().get("Length", "").startswith("4,096 bytes"))
    assert page.text("h1 .name") == ODD
    page.open(f"{place.url}/#/scope/{SCOPE}/key/absent")
    page.shows(".slot [role=status]", "No live page and no lease has this key.")


def test_slots_by_their_state(page, server):
    place, client = server
    page.open(f"{place.url}/#/scope/{SCOPE}")
    page.click(".choice span", "leased")
    page.until(lambda: len(page.all(ROWS)) == 5)
    every = inspected(client, slots=list(range(SLOTS)))
    expected = [str(slot.slot) for slot in every if slot.state == "leased"]
    assert page.texts(f"{ROWS} th") == expected
    assert set(page.texts(f"{ROWS} td:nth-child(7)")) == {"conformance"}
    assert all(text.endswith(" s") for text in page.texts(f"{ROWS} td:nth-child(9)"))
    assert page.fragment.endswith("?state=leased")
    page.open(f"{place.url}/#/scope/{SCOPE}?state=quarantined")
    page.until(lambda: len(page.all(ROWS)) == 7)
    assert "7 quarantined among the slots 0 to 129 of 130." in page.texts("[role=status]")
    page.click(".choice span", "live")
    page.until(lambda: len(page.all(ROWS)) == 50)
    page.click(".pager button", "Next")
    page.until(lambda: len(page.all(ROWS)) == 43)
    page.click(f"{ROWS} th a")
    page.shows("h1", "Slot")


def test_slots_a_page_at_a_time(page, server):
    place, _ = server
    page.open(f"{place.url}/#/scope/{SCOPE}")
    for first, last in ((0, 49), (50, 99), (100, 129)):
        page.shows(".scope [role=status]", f"Slots {first} to {last} of 130.")
        assert page.texts(f"{ROWS} th") == [str(slot) for slot in range(first, last + 1)]
        if last < 129:
            page.click(".pager button", "Next")
    assert not page.until(
        lambda: next(b for b in page.all(".pager button") if b.text == "Next")
    ).is_enabled()
    page.enter("input[type=number]", f"129{Keys.ENTER}")
    page.shows("h1", "Slot 129")
    page.until(lambda: page.facts().get("State", "").startswith("free"))
    page.open(f"{place.url}/#/scope/{SCOPE}/slot/130")
    page.shows(".slot [role=status]", "there are 130 slots")
    page.expected = ["422"]


def test_the_list_is_sorted_and_filtered(page, server):
    place, client = server
    page.open(place.url)
    page.until(lambda: page.all(TABLE))
    names = sorted(scopes(client), key=lambda name: int(name.partition(":")[0]))
    assert [row[0] for row in table(page)] == names[:25]
    page.click(".scopes th button", "Slots")
    page.until(
        lambda: any(head.text.startswith("Slots") for head in page.all("th[aria-sort=descending]"))
    )
    assert [int(row[2]) for row in table(page)] == [10 * number for number in range(39, 14, -1)]
    page.click(".scopes th button", "Slots")
    page.until(lambda: page.all("th[aria-sort=ascending]"))
    assert table(page)[0][2] == "10"
    page.click(".pager button", "Next")
    page.shows(".pager", "Page 2 of 2")
    assert len(table(page)) == 15
    page.enter("#filter", "KV cf-ident MODEL<")
    page.until(lambda: len(table(page)) == 1)
    assert "1 of 40" in page.texts("[role=status]")
    page.open(page.run("return location.href"))
    page.until(lambda: [row[0] for row in table(page)] == [SCOPE])
    page.enter("#filter", "nothing like it")
    page.shows("p", "No scope has that in its name, model or identity.")


def test_the_past_is_drawn_and_told(page, server):
    place, _ = server
    page.open(place.url)
    page.until(
        lambda: page.run(
            "return [...document.querySelectorAll('.chart path.one.line')].some((line) => "
            "line.getAttribute('d'))"
        )
    )
    assert page.texts(".chart h3") == [
        "Requests per second",
        "Hit ratio % of keys asked for",
        "Time to answer ms",
        "Evictions pages per second",
        "Occupancy % of slots",
        "Leases and quarantine slots",
    ]

    def label():
        """What is told of the occupancy; nothing before it is drawn."""
        return page.run(
            "return document.querySelectorAll('.chart "
            "svg[role=img]')[4].getAttribute('aria-label') || ''"
        )

    page.until(lambda: "live" in label())
    live, every = 93, SLOTS + sum(10 * number for number in range(1, 40))
    assert f"now: live {100 * live / every:.1f}%" in label()
    page.all(".chart svg[role=img]")[4].send_keys(Keys.HOME)
    page.until(lambda: " at " in label())
    assert page.text(".chart:nth-child(5) .when")
    page.click(".choice span", "24 hours")
    page.until(lambda: page.fragment == "#/?range=day")
    slow = page.run(
        "return [...document.querySelectorAll('.slowest tbody tr')].map((row) => row.textContent)"
    )
    page.click("button", "Show all 20")
    page.until(lambda: len(page.all(".slowest tbody tr")) == 20)
    assert len(slow) == 8
    # Its own calls may be among the slowest, and come in between.
    page.until(lambda: page.texts(".slowest tbody th") == page.run(SLOWEST))


SLOWEST = "return fetch('/v2/history').then((answer) => answer.json()).then((told) => told.slowest.map((call) => call.route))"


@pytest.mark.long
def test_it_pauses(page, server):
    place, _ = server
    page.open(place.url)
    page.shows("#freshness", "up to date")
    page.click("#pause")
    page.shows("#freshness", "paused")
    page.requests()
    page.until(lambda: seconds_of_the_pause(page) >= 5)
    assert page.requests() == []
    page.click("#pause")
    page.shows("#freshness", "up to date")
    page.until(page.requests)


def seconds_of_the_pause(page):
    return int(re.fullmatch(r"paused (\d+) s ago", page.text("#freshness"))[1])


@pytest.mark.long
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("path", ["", f"scope/{SCOPE}", f"scope/{SCOPE}/slot/0"])
def test_a_narrow_screen_and_readable_colours(page, server, path, dark):
    place, _ = server
    page.open(f"{place.url}/#/{path}", width=400, dark=dark)
    page.until(lambda: page.all("dl.facts dd"))
    page.until(lambda: page.all("table tbody tr") or page.all(".slot dd strong"))
    assert page.run("return document.documentElement.scrollWidth") <= 400
    assert page.run(UNNAMED) == []
    assert {name: ratio for name, ratio in page.run(CONTRASTS).items() if ratio < 4.5} == {}
    assert len(page.all("h1")) == 1


UNNAMED = """
return [...document.querySelectorAll("button, input, a, svg[role], [role=img], section")].filter((element) =>
  !(element.textContent.trim() || element.ariaLabel || element.labels?.length || element.getAttribute("aria-labelledby")))
  .map((element) => element.outerHTML);
"""
CONTRASTS = """
const paint = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
const rgb = (name) => {
  paint.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(name);
  paint.fillRect(0, 0, 1, 1);
  return [...paint.getImageData(0, 0, 1, 1).data].slice(0, 3);
};
const light = (name) => rgb(name).map((part) => part / 255).map((part) => (part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
  .reduce((sum, part, i) => sum + part * [0.2126, 0.7152, 0.0722][i], 0);
const found = {};
for (const text of ["--text", "--quiet", "--link", "--red"]) for (const ground of ["--page", "--card"]) {
  const [a, b] = [light(text), light(ground)].sort((x, y) => y - x);
  found[text + " on " + ground] = (a + 0.05) / (b + 0.05);
}
return found;
"""


@pytest.mark.long
def test_an_empty_server(page):
    with served(SERVE) as (place, _):
        page.open(place.url)
        page.shows("p", "No scope yet.")
        page.open(f"{place.url}/#/scope/0:kv")
        page.shows("p", "The server has no such scope.")
        page.open(f"{place.url}/#/scope/0:kv/key/a")
        page.shows("p", "The server has no such scope.")
        page.expected = ["404"]


@pytest.mark.long
def test_a_token_is_asked_for_and_kept_in_the_tab(page, tmp_path):
    file = write_tokens(tmp_path / "tokens.json", operator="admin all", reader="read look")
    page.expected = ["401"]
    with served(f"{LASTING} --token-file {file}", "all") as (place, client):
        V2Scope(client, SCOPE, SLOTS, 4096, random.Random(1)).initialize()
        page.open(f"{place.url}/#/scope/{SCOPE}")
        page.shows("h1", "This server asks for a token")
        assert SCOPE not in page.text("body"), "nothing is told without one"
        assert not page.all(".token [role=alert]")[0].is_displayed()
        assert page.run("return document.activeElement.id") == "token"
        page.enter("#token", f"wrong{Keys.ENTER}")
        page.shows(".token [role=alert]", "this server needs a bearer token that it knows")
        page.enter("#token", f"look{Keys.ENTER}")
        page.shows("h1", SCOPE)
        page.until(lambda: len(page.all(ROWS)) == 50)
        page.driver.refresh()
        page.shows("h1", SCOPE)
        assert page.run(
            "return [localStorage.length, document.cookie, location.href.includes('look')]"
        ) == [0, "", False]
        page.click("#forget")
        page.shows("h1", "This server asks for a token")
        assert page.run("return sessionStorage.length") == 0


@pytest.mark.long
def test_a_server_that_is_killed_and_comes_back(page):
    page.expected = ["ERR_CONNECTION"]
    with served(LASTING) as (place, client):
        scope = V2Scope(client, SCOPE, SLOTS, 4096, random.Random(1))
        scope.initialize()
        scope.store(["a", "b"])
        page.open(place.url)
        page.until(lambda: table(page) and table(page)[0][3] == "2")
        place.kill()
        page.shows("#banner", "The server has not answered since")
        assert table(page)[0][3] == "2", "what was known stays"
        place.start()
        page.shows("#banner", "The server has started anew")
        page.shows("#freshness", "up to date")
        assert table(page)[0][3] == "2"


@pytest.mark.long
def test_a_name_with_a_hash_takes_two_lines_at_most(page):
    name = "0:kv-" + "0123456789abcdef" * 2
    with served(LASTING) as (place, client):
        client.http.post("/0/initialize", {"num_pages": 50, "namespace": name[2:]})
        client.http.post("/v2/describe", {"scope": name, "model": "m" * 60})
        page.open(place.url, width=1000)
        page.until(lambda: table(page))
        lines = "return document.querySelector('.scopes tbody th a').getClientRects().length"
        assert page.run(lines) <= 2


@pytest.mark.long
def test_a_server_that_drains(page):
    page.expected = ["503"]
    with served(LASTING) as (place, client):
        page.open(place.url)
        page.shows(".health", "Ready")
        client.call("/v2/drain", Drain(enabled=True), Draining)
        page.ask_now()
        page.shows(".health", "This server drains: it gives no new leases.")
        client.call("/v2/drain", Drain(enabled=False), Draining)
        page.ask_now()
        page.shows(".health", "Ready")


ABOUT = {
    "protocol": "2",
    "server": "another 1.0",
    "instance": "i1",
    "durability": "none",
    "limits": {"keys": 384, "lease_seconds": 30, "quarantine_seconds": 5},
}
LISTED = {
    "scopes": [
        {
            "scope": SCOPE,
            "slots": 8,
            "free": 8,
            "leased": 0,
            "live": 0,
            "quarantined": 0,
            "slot_bytes": 0,
            "geometry": "",
            "identity": "",
            "hits": 0,
            "misses": 0,
            "evicted": 0,
            "owner": "http://one:18000",
            "log_bytes": 2048,
        }
    ]
}


class CannedAnswers(BaseHTTPRequestHandler):
    """A server that says what a test puts into its mouth, and serves the page."""

    assets = read_assets()

    def __init__(self, answers, *args):
        self.answers = answers
        super().__init__(*args)

    def do_GET(self):
        path = self.path.partition("?")[0]
        if path in self.assets:
            self.say(200, self.assets[path].body, self.assets[path].content_type)
        else:
            status, body = self.answers.get(
                path, (404, {"code": "unknown_route", "message": "there is no such thing"})
            )
            self.say(
                status,
                body if isinstance(body, bytes) else json.dumps(body).encode(),
                "application/json",
            )

    def say(self, status, body, content_type):
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@contextmanager
def saying(answers):
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(CannedAnswers, answers)) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def problem(status, code, message):
    return status, {"code": code, "message": message, "field": ""}


@pytest.mark.long
def test_problems_in_words_and_back(page):
    page.expected = ["status of"]
    well = {"/readyz": (200, {"status": "ok"}), "/v2": (200, ABOUT), "/v2/scopes": (200, LISTED)}
    answers = dict(well)
    with saying(answers) as url:
        page.open(url)
        shown = [SCOPE, "", "8", "0", "0", "0", "8", "0%", NONE, "0", "http://one:18000", "2 KiB"]
        page.until(lambda: table(page) == [shown])
        assert page.all(f"{TABLE} td.shared")[0].is_displayed()
        page.shows("p", "This server keeps no history.")
        for path, answer, words in (
            (
                "/v2/scopes",
                problem(503, "unavailable", "the store does not answer"),
                "The server cannot answer now: the store does not answer.",
            ),
            (
                "/v2/scopes",
                problem(429, "too_many", "100 requests a second"),
                "asked too often: 100 requests a second.",
            ),
            (
                "/v2/scopes",
                problem(500, "internal", "this server is at fault"),
                "The server answered 500 internal: this server is at fault.",
            ),
            (
                "/v2",
                (502, b"<html>Bad Gateway</html>"),
                "something else may stand between this page and the server",
            ),
            (
                "/readyz",
                (502, b"<html>Bad Gateway</html>"),
                "something else may stand between this page and the server",
            ),
        ):
            answers.update(well)
            answers[path] = answer
            page.ask_now()
            page.shows("#banner", words)
        answers.update(well)
        page.ask_now()
        page.until(lambda: not page.all("#banner")[0].is_displayed())
        answers["/readyz"] = problem(
            503, "unavailable", "the last changes could not be written: disk full"
        )
        page.ask_now()
        page.shows(".health", "Not ready")
        page.shows(".health", "The last changes could not be written: disk full.")
        answers["/readyz"] = well["/readyz"]
        answers["/v2"] = problem(403, "forbidden", "this token permits nothing")
        page.ask_now()
        page.shows("h1", "This server asks for a token")
        page.enter("#token", f"x{Keys.ENTER}")
        page.shows(
            ".token [role=alert]",
            "This token is known and does not permit reading: this token permits nothing.",
        )
        answers["/v2"] = well["/v2"]
        page.enter("#token", f"y{Keys.ENTER}")
        page.until(lambda: page.all(TABLE))
