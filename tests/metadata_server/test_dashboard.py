"""Status page in a real browser, with a real server: what only a browser can find. What the routes
say has tests of its own."""

from __future__ import annotations

import json
from urllib.parse import urlsplit

import pytest
from selenium.webdriver.common.keys import Keys

from hicache_metadata_server import protocol as p
from tests.metadata_server import services
from tests.metadata_server.browser import browser
from tests.metadata_server.servers import SERVE, RemoteService, served
from tests.metadata_server.token_files import write_tokens

pytestmark = [pytest.mark.slow(seconds=40), pytest.mark.merge]

LASTING = f"{SERVE} --store sqlite:///{{tmp}}/m.db --quarantine-seconds 900 --lease-seconds 600"
SLOTS = 130
ODD = 'a/b?c#d%2F "<img src=x onerror=alert(1)>" é'
SCOPE = "0:kv-1f0c9a3b"
MODEL = "org/<b>model</b>"
TABLE = ".scopes tbody tr"
ROWS = ".slots tbody tr"
CHART = ".chart svg[aria-label]"
STATES = ("live", "leased", "quarantined", "free")


@pytest.fixture(scope="module")
def driver():
    with browser() as driver:
        yield driver


@pytest.fixture
def page(driver):
    """The browser; in the end nothing has gone wrong that a test did not name in `expected`, and
    one server was asked, and nobody else."""
    driver.expected = []
    driver.complaints()
    driver.requests()
    yield driver
    driver.driver.get("about:blank")
    told = driver.complaints()
    assert [said for said in told if not any(one in said for one in driver.expected)] == []
    asked = [urlsplit(url) for url in driver.requests()]
    assert len({(url.scheme, url.netloc) for url in asked if url.scheme != "about"}) <= 1


@pytest.fixture(scope="module")
def server():
    """With forty small scopes, and one whose slots are in every state."""
    with served(LASTING) as (place, client):
        service = RemoteService(client)
        initialize(client)
        for rank in range(1, 40):
            services.initialize(service, f"{rank}:mamba", slots=10 * rank)
        client.post("/v2/describe", {"scope": SCOPE, "model": MODEL})
        keys = [ODD, *(f"page-{i:03}" for i in range(99))]
        leased = services.reserve(service, keys, SCOPE, prefixes=["", *keys[:-1]])
        services.commit(service, leased.leases, SCOPE)
        services.reserve(service, [f"writing-{i}" for i in range(5)], SCOPE)
        services.delete(service, keys[-7:], SCOPE)
        services.lookup(service, [*keys[:3], "absent"], SCOPE)
        yield place, client


def initialize(client):
    made = p.ScopeGeometry(
        scope=SCOPE, slots=SLOTS, slot_bytes=4096, geometry="page_first", identity="cf-identity"
    )
    client.call("/v2/initialize", p.Initialize(scopes=[made]), p.Initialized)


def scopes(client):
    return {status.scope: status for status in client.call("/v2/scopes", None, p.Scopes).scopes}


def inspected(client, **asked):
    return client.call("/v2/inspect", p.Inspect(scope=SCOPE, **asked), p.Inspected).slots


def test_the_overview_shows_what_the_api_says(page, server):
    place, client = server
    page.open(place.url)
    page.shows(".health", "Ready")
    about = page.facts()
    assert about["Instance"] == client.call("/v2", None, p.About).instance
    limits = about["Durability"], about["Leases last"], about["Quarantine"]
    assert limits == ("process", "600 s", "900 s")
    page.has(TABLE, 25)
    every = scopes(client)
    shown = {row[0]: row[1:7] for row in page.table(TABLE)}
    assert list(shown) == [SCOPE, *(f"{rank}:mamba" for rank in range(1, 25))]
    assert shown[SCOPE] == [MODEL, "130", "93", "5", "7", "25"]
    assert not page.all(f"{TABLE} td.shared")[0].is_displayed(), "no other server is there"
    sums = [sum(getattr(one, state) for one in every.values()) for state in STATES]
    assert page.texts(".states b") == [f"{number:,}" for number in sums]
    bar, live = (page.all(f".card > .bar{part}")[0].size["width"] for part in ("", " > .live"))
    assert live / bar == pytest.approx(sums[0] / sum(sums), abs=0.01)
    # All together are nearly empty here; one scope is not.
    page.shows(".fullest", f"Fullest scope: {SCOPE}, {100 * 105 / 130:.1f}% of 130 slots in use")
    # Charts are drawn, and told to those who do not see them.
    page.until(lambda: any(path.get_attribute("d") for path in page.all(".chart path.one.line")))
    label = f"now: live {100 * 93 / sum(one.slots for one in every.values()):.1f}%"
    page.until(lambda: any(label in svg.get_attribute("aria-label") for svg in page.all(CHART)))
    page.click(".choice span", "24 hours")
    page.until(lambda: page.driver.current_url.endswith("?range=day"))
    page.click("button", "Show all 20")
    page.has(".slowest tbody tr", 20)

    def slowest():
        return [call["route"] for call in json.loads(client.get("/v2/history").body)["slowest"]]

    # The page's own calls may be among them, and come in between.
    page.until(lambda: page.texts(".slowest tbody th")[:8] == slowest()[:8])


def test_the_list_is_sorted_and_filtered(page, server):
    page.open(server[0].url)
    for direction, first in (("descending", "390"), ("ascending", "10")):
        page.click(".scopes th button", "Slots")
        page.shows(f"th[aria-sort={direction}]", "Slots")
        assert page.table(TABLE)[0][2] == first
    page.click(".pager button", "Next")
    page.shows(".pager", "Page 2 of 2")
    page.has(TABLE, 15)
    page.enter("#filter", "KV cf-ident MODEL<")
    page.shows("[role=status]", "1 of 40")
    page.open(page.driver.current_url)
    page.until(lambda: [row[0] for row in page.table(TABLE)] == [SCOPE])


def test_from_the_list_to_a_key_whatever_it_is_made_of(page, server):
    place, client = server
    page.open(place.url, width=400)
    page.click("a", SCOPE)
    page.shows("h1", SCOPE)
    facts = page.facts()
    assert (facts["Slots"], facts["Bytes of a slot"]) == ("130", "4,096 (4 KiB)")
    assert (facts["Identity"], facts["Geometry"]) == ("cf-identity", "page_first")
    assert (facts["Hit ratio"], facts["Model"]) == ("75.0% of 4 keys", MODEL)
    page.has(ROWS, 50)
    assert page.run("return document.documentElement.scrollWidth") <= 400
    page.click(".slots a", "page-000")
    page.shows("dt", "Key before it")
    page.click("dd a", ODD)
    page.shows("h1", ODD)
    # The address can be given to somebody else.
    page.open(page.driver.current_url)
    page.shows("dt", "Checksum")
    [slot], facts = inspected(client, keys=[ODD]), page.facts()
    assert facts["Checksum"] == f"{slot.checksum:#018x} {slot.checksum}"
    assert (facts["Length"][:7], facts["Generation"]) == ("7 bytes", str(slot.generation))
    assert facts["In the file"] == f"bytes {4096 * slot.slot:,} to {4096 * (slot.slot + 1) - 1:,}"
    page.click(".crumbs a", SCOPE)
    page.enter("#key", f"absent{Keys.ENTER}")
    page.shows(".slot [role=status]", "No live page and no lease has this key.")
    page.click(".crumbs a", "Overview")
    page.has(TABLE, 25)


def test_slots_by_their_state_and_a_page_at_a_time(page, server):
    place, client = server
    page.open(f"{place.url}/#/scope/{SCOPE}")
    for first, last in ((0, 49), (50, 99), (100, 129)):
        page.shows(".scope [role=status]", f"Slots {first} to {last} of 130.")
        assert page.texts(f"{ROWS} th") == [str(slot) for slot in range(first, last + 1)]
        page.click(".pager button", "Next") if last < 129 else None
    page.click(".choice span", "leased")
    page.has(ROWS, 5)
    leased = [one for one in inspected(client, slots=list(range(SLOTS))) if one.state == "leased"]
    assert page.texts(f"{ROWS} th") == [str(one.slot) for one in leased]
    assert set(page.texts(f"{ROWS} td:nth-child(7)")) == {"me"}
    page.open(page.driver.current_url.replace("leased", "quarantined"))
    page.shows("[role=status]", "7 quarantined among the slots 0 to 129 of 130.")
    page.enter("input[type=number]", f"129{Keys.ENTER}")
    page.shows("h1", "Slot 129")
    page.shows("dd strong", "free")
    page.open(f"{place.url}/#/scope/{SCOPE}/slot/130")
    page.shows(".slot [role=status]", "there are 130 slots")
    page.expected = ["422"]


@pytest.mark.long
def test_a_token_is_asked_for_and_kept_in_the_tab(page, tmp_path):
    file = write_tokens(
        tmp_path / "tokens.json", operator="admin all", reader="read look", acme="read mine acme"
    )
    page.expected = ["401", "403"]
    with served(f"{LASTING} --token-file {file}", "all") as (place, client):
        initialize(client)
        page.open(f"{place.url}/#/scope/{SCOPE}")
        page.shows("h1", "This server asks for a token")
        assert SCOPE not in page.texts("body")[0], "nothing is told without one"
        page.enter("#token", f"wrong{Keys.ENTER}")
        page.shows(".token [role=alert]", "this server needs a bearer token that it knows")
        page.enter("#token", f"mine{Keys.ENTER}")
        page.shows(".token [role=alert]", "This token is known and does not permit reading")
        page.enter("#token", f"look{Keys.ENTER}")
        page.has(ROWS, 50)
        page.driver.refresh()
        page.shows("h1", SCOPE)
        kept = page.run("return localStorage.length + document.cookie + location.href")
        assert kept.startswith("0http")
        assert "look" not in kept
        page.click("#forget")
        page.shows("h1", "This server asks for a token")
        assert page.run("return sessionStorage.length") == 0


@pytest.mark.long
def test_it_asks_again_and_says_how_old_its_answers_are(page):
    page.expected = ["net::ERR_"]
    with served(LASTING) as (place, client):
        page.open(f"{place.url}/#/scope/{SCOPE}")
        page.shows("p", "The server has no such scope.")
        page.open(place.url)
        page.shows("p", "No scope yet.")
        initialize(client)
        page.shows(TABLE, SCOPE)
        page.click("#pause")
        page.requests()
        page.shows("#freshness", "paused 5 s ago")
        assert page.requests() == []
        page.click("#pause")
        page.shows("#freshness", "up to date")
        place.kill()
        page.shows("#banner", "The server has not answered since")
        page.shows(TABLE, SCOPE)
        place.start()
        page.shows("#banner", "The server has started anew")
        page.shows("#freshness", "up to date")


ANSWER = """
window.fetched ??= window.fetch;
window.fetch = (path, options) => {
  const answer = arguments[0][path.split("?")[0]];
  return answer ? Promise.resolve(new Response(answer[1], { status: answer[0] })) : window.fetched(path, options);
};
"""
COUNTS = '"slots": 8, "free": 8, "live": 0, "leased": 0, "quarantined": 0, "hits": 0, "misses": 0'
FOREIGN = f'{{"scope": "0:kv", "owner": "http://one", "log_bytes": 2048, "evicted": 0, {COUNTS}}}'


def refusal(status, code):
    return status, p.encode(p.Problem(code=code, message="the reason")).decode()


@pytest.mark.long
@pytest.mark.parametrize(
    ("answers", "selector", "words"),
    [
        ({"/v2/scopes": refusal(503, "unavailable")}, "#banner", "cannot answer now: the reason."),
        ({"/v2/scopes": refusal(429, "many")}, "#banner", "asked too often: the reason."),
        ({"/v2/scopes": refusal(500, "internal")}, "#banner", "answered 500 internal: the reason."),
        ({"/readyz": (502, "<html>")}, "#banner", "something else may stand between"),
        ({"/readyz": refusal(503, "unavailable")}, ".health", "Not readyThe reason."),
        ({"/readyz": refusal(503, "draining")}, ".health", "DrainingThe reason."),
        ({"/v2/history": refusal(404, "unknown_route")}, "p", "This server keeps no history."),
        ({"/v2/scopes": (200, f'{{"scopes": [{FOREIGN}]}}')}, TABLE, "http://one2 KiB"),
    ],
)
def test_answers_of_other_servers_in_words(page, server, answers, selector, words):
    """The page gets them in the place of its server's."""
    page.open(server[0].url)
    page.has(TABLE, 25)
    page.run(ANSWER, answers)
    # As it does when its tab is looked at again.
    page.run("document.dispatchEvent(new Event('visibilitychange'))")
    page.shows(selector, words)
