"""Status page in a real browser, with a real server."""

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

pytestmark = pytest.mark.slow(seconds=57)

LASTING = f"{SERVE} --store sqlite:///{{tmp}}/m.db --quarantine-seconds 900 --lease-seconds 600"
SLOTS = 130
ODD = 'a/b?c#d%2F "<img src=x onerror=alert(1)>" é'
SCOPE = "0:kv-1f0c9a3b"
MODEL = "org/<b>model</b>"
TABLE = ".scopes tbody tr"
ROWS = ".slots tbody tr"
NONE = "\N{EN DASH}"
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
        others = [(f"{n}:mamba-1f0c9a3b", 10 * n, 1 << 20) for n in range(1, 40)]
        initialize(client, *others)
        service = RemoteService(client)
        client.post("/v2/describe", {"scope": SCOPE, "model": MODEL})
        keys = [ODD, *(f"page-{i:03}" for i in range(99))]
        leased = services.reserve(service, keys, SCOPE, prefixes=["", *keys[:-1]])
        part = p.CommitScope(
            scope=SCOPE,
            leases=leased.leases,
            lengths=[4096 - i for i in range(100)],
            checksums=[2**64 - 1, *range(2**63, 2**63 + 99)],
        )
        client.call("/v2/commit", p.Commit(scopes=[part]), p.SettledLeases)
        services.reserve(service, [f"writing-{i}" for i in range(5)], SCOPE)
        services.delete(service, keys[-7:], SCOPE)
        services.lookup(service, [*keys[:3], "absent"], SCOPE)
        yield place, client


def initialize(client, *others):
    """Make the scope of the tests, and others by name, slots and bytes of a slot."""
    alike = {"geometry": "page_first", "identity": "cf-identity"}
    made = [
        p.ScopeGeometry(scope=name, slots=slots, slot_bytes=slot_bytes, **alike)
        for name, slots, slot_bytes in ((SCOPE, SLOTS, 4096), *others)
    ]
    client.call("/v2/initialize", p.Initialize(scopes=made), p.Initialized)


def scopes(client):
    return {status.scope: status for status in client.call("/v2/scopes", None, p.Scopes).scopes}


def inspected(client, **asked):
    return client.call("/v2/inspect", p.Inspect(scope=SCOPE, **asked), p.Inspected).slots


def test_figures_are_those_of_the_api(page, server):
    place, client = server
    page.open(place.url)
    page.shows(".health", "Ready")
    about = page.facts()
    assert about["Instance"] == client.call("/v2", None, p.About).instance
    limits = about["Durability"], about["Leases last"], about["Quarantine"]
    assert limits == ("process", "600 s", "900 s")
    page.has(TABLE, 25)
    rows = page.table(TABLE)
    every = scopes(client)
    status = every[SCOPE]
    assert (status.live, status.leased, status.quarantined, status.free) == (93, 5, 7, 25)
    shown = {row[0]: row[2:7] for row in rows}
    assert shown[SCOPE] == ["130", "93", "5", "7", "25"]
    assert not page.all(f"{TABLE} td.shared")[0].is_displayed(), "no other server is there"
    assert {row[0]: row[1] for row in rows if row[1]} == {SCOPE: MODEL}
    sums = [sum(getattr(one, state) for one in every.values()) for state in STATES]
    assert page.texts(".states b") == [f"{number:,}" for number in sums]
    whole, *widths = page.run(
        "return [...document.querySelectorAll('.card > .bar, .card > .bar > *')].map((part) => "
        "part.getBoundingClientRect().width)"
    )
    shares = [number / sum(one.slots for one in every.values()) for number in sums[:3]]
    assert widths == [pytest.approx(max(2, share * whole), abs=1) for share in shares]
    # All together are nearly empty here; one scope is not.
    page.shows(".fullest", f"Fullest scope: {SCOPE}, {100 * 105 / 130:.1f}% of 130 slots in use")
    page.click(".fullest a")
    page.shows("h1", SCOPE)


def test_from_the_list_through_a_scope_to_a_key(page, server):
    place, client = server
    page.open(place.url)
    page.click("a", SCOPE)
    page.shows("h1", SCOPE)
    assert (
        page.facts().items()
        >= {
            "Slots": "130",
            "Bytes of a slot": "4,096 (4 KiB)",
            "All of it": "520 KiB",
            "Identity": "cf-identity",
            "Geometry": "page_first",
            "Hit ratio": "75.0% of 4 keys",
            "Model": MODEL,
        }.items()
    )
    page.has(ROWS, 50)
    page.click(".slots a", "page-007")
    page.shows("h1", "page-007")
    page.until(lambda: "Checksum" in page.texts("dt"))
    (slot,) = inspected(client, keys=["page-007"])
    facts = page.facts()
    assert facts["State"].startswith("live")
    assert facts["Slot"].startswith(str(slot.slot))
    assert facts["Checksum"] == f"{slot.checksum:#018x} {slot.checksum}"
    assert facts["Length"].startswith("4,088 bytes")
    assert facts["Generation"] == str(slot.generation)
    assert facts["Key before it"] == "page-006"
    assert facts["In the file"] == f"bytes {4096 * slot.slot:,} to {4096 * (slot.slot + 1) - 1:,}"
    page.click("dd a", "page-006")
    page.shows("h1", "page-006")
    page.driver.back()
    page.shows("h1", "page-007")
    page.click(".crumbs a", "Overview")
    page.until(lambda: page.all(TABLE))


@pytest.mark.long
def test_a_key_is_found_whatever_it_is_made_of(page, server):
    place, _ = server
    page.open(f"{place.url}/#/scope/{SCOPE}")
    page.enter("#key", ODD + Keys.ENTER)
    page.shows("h1", ODD)
    page.until(lambda: page.facts().get("State", "").startswith("live"))
    facts = page.facts()
    assert facts["Checksum"] == "0xffffffffffffffff 18446744073709551615"
    # The address can be given to somebody else.
    page.open(page.run("return location.href"))
    page.until(lambda: page.facts().get("Length", "").startswith("4,096 bytes"))
    assert page.text("h1 .name") == ODD
    page.open(f"{place.url}/#/scope/{SCOPE}/key/absent")
    page.shows(".slot [role=status]", "No live page and no lease has this key.")


def test_slots_by_their_state_and_a_page_at_a_time(page, server):
    place, client = server
    page.open(f"{place.url}/#/scope/{SCOPE}")
    for first, last in ((0, 49), (50, 99), (100, 129)):
        page.shows(".scope [role=status]", f"Slots {first} to {last} of 130.")
        assert page.texts(f"{ROWS} th") == [str(slot) for slot in range(first, last + 1)]
        page.click(".pager button", "Next") if last < 129 else None
    [following] = [one for one in page.all(".pager button") if one.text == "Next"]
    assert not following.is_enabled()
    page.click(".choice span", "leased")
    page.has(ROWS, 5)
    every = inspected(client, slots=list(range(SLOTS)))
    expected = [str(slot.slot) for slot in every if slot.state == "leased"]
    assert page.texts(f"{ROWS} th") == expected
    assert set(page.texts(f"{ROWS} td:nth-child(7)")) == {"me"}
    assert all(text.endswith(" s") for text in page.texts(f"{ROWS} td:nth-child(9)"))
    assert page.fragment.endswith("?state=leased")
    page.open(f"{place.url}/#/scope/{SCOPE}?state=quarantined")
    page.has(ROWS, 7)
    assert "7 quarantined among the slots 0 to 129 of 130." in page.texts("[role=status]")
    page.click(".choice span", "live")
    page.has(ROWS, 50)
    page.click(".pager button", "Next")
    page.has(ROWS, 43)
    page.click(f"{ROWS} th a")
    page.shows("h1", "Slot")
    page.open(f"{place.url}/#/scope/{SCOPE}")
    page.enter("input[type=number]", f"129{Keys.ENTER}")
    page.shows("h1", "Slot 129")
    page.until(lambda: page.facts().get("State", "").startswith("free"))
    page.open(f"{place.url}/#/scope/{SCOPE}/slot/130")
    page.shows(".slot [role=status]", "there are 130 slots")
    page.expected = ["422"]


def test_the_list_is_sorted_and_filtered(page, server):
    place, client = server
    page.open(place.url)
    page.has(TABLE, 25)
    names = sorted(scopes(client), key=lambda name: int(name.partition(":")[0]))
    assert [row[0] for row in page.table(TABLE)] == names[:25]
    page.click(".scopes th button", "Slots")
    page.shows("th[aria-sort=descending]", "Slots")
    slots = [int(row[2]) for row in page.table(TABLE)]
    assert slots == [10 * number for number in range(39, 14, -1)]
    page.click(".scopes th button", "Slots")
    page.until(lambda: page.all("th[aria-sort=ascending]"))
    assert page.table(TABLE)[0][2] == "10"
    page.click(".pager button", "Next")
    page.shows(".pager", "Page 2 of 2")
    page.has(TABLE, 15)
    page.enter("#filter", "KV cf-ident MODEL<")
    page.has(TABLE, 1)
    assert "1 of 40" in page.texts("[role=status]")
    page.open(page.run("return location.href"))
    page.until(lambda: [row[0] for row in page.table(TABLE)] == [SCOPE])
    page.enter("#filter", "nothing like it")
    page.shows("p", "No scope has that in its name, model or identity.")


def test_the_past_is_drawn_and_told(page, server):
    place, client = server
    page.open(place.url)
    lines = "return [...document.querySelectorAll('.chart path.one.line')].some((line) => "
    page.until(lambda: page.run(f"{lines}line.getAttribute('d'))"))
    titles = ["Requests per second", "Hit ratio", "Time to answer", "Evictions", "Occupancy"]
    told = page.texts(".chart h3")
    for title, text in zip([*titles, "Leases and quarantine"], told, strict=True):
        assert text.startswith(title)

    def label():
        """What is told of the occupancy; nothing before it is drawn."""
        return page.all(".chart svg[role=img]")[4].get_attribute("aria-label") or ""

    page.until(lambda: "live" in label())
    every = sum(one.slots for one in scopes(client).values())
    assert f"now: live {100 * 93 / every:.1f}%" in label()
    page.all(".chart svg[role=img]")[4].send_keys(Keys.HOME)
    page.until(lambda: " at " in label())
    assert page.text(".chart:nth-child(5) .when")
    page.click(".choice span", "24 hours")
    page.until(lambda: page.fragment == "#/?range=day")
    page.has(".slowest tbody tr", 8)
    page.click("button", "Show all 20")
    page.has(".slowest tbody tr", 20)

    def slowest():
        told = json.loads(client.get("/v2/history").body)["slowest"]
        return [call["route"] for call in told]

    # Its own calls may be among the slowest, and come in between.
    page.until(lambda: page.texts(".slowest tbody th") == slowest())


@pytest.mark.long
def test_it_pauses(page, server):
    place, _ = server
    page.open(place.url)
    page.shows("#freshness", "up to date")
    page.click("#pause")
    page.shows("#freshness", "paused")
    page.requests()
    page.shows("#freshness", "paused 5 s ago")
    assert page.requests() == []
    page.click("#pause")
    page.shows("#freshness", "up to date")
    page.until(page.requests)


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
def test_a_token_is_asked_for_and_kept_in_the_tab(page, tmp_path):
    file = write_tokens(tmp_path / "tokens.json", operator="admin all", reader="read look")
    page.expected = ["401"]
    with served(f"{LASTING} --token-file {file}", "all") as (place, client):
        initialize(client)
        page.open(f"{place.url}/#/scope/{SCOPE}")
        page.shows("h1", "This server asks for a token")
        assert SCOPE not in page.text("body"), "nothing is told without one"
        assert not page.all(".token [role=alert]")[0].is_displayed()
        assert page.run("return document.activeElement.id") == "token"
        page.enter("#token", f"wrong{Keys.ENTER}")
        page.shows(".token [role=alert]", "this server needs a bearer token that it knows")
        page.enter("#token", f"look{Keys.ENTER}")
        page.shows("h1", SCOPE)
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
def test_a_server_that_is_killed_and_comes_back(page):
    page.expected = ["ERR_CONNECTION"]
    with served(LASTING) as (place, client):
        initialize(client)
        services.store(RemoteService(client), ["a", "b"], SCOPE)

        def live():
            return [row[3] for row in page.table(TABLE)]

        page.open(place.url)
        page.until(lambda: live() == ["2"])
        place.kill()
        page.shows("#banner", "The server has not answered since")
        assert live() == ["2"], "what was known stays"
        place.start()
        page.shows("#banner", "The server has started anew")
        page.shows("#freshness", "up to date")
        assert live() == ["2"]


NO_PAGES = {"free": 8, "leased": 0, "live": 0, "quarantined": 0}
FOREIGN = {"owner": "http://one:18000", "log_bytes": 2048}
LISTED = p.Scopes(scopes=[p.ScopeStatus(scope=SCOPE, slots=8, **NO_PAGES, **FOREIGN)])
ANSWER = """
window.fetched ??= window.fetch;
window.fetch = (path, options) => {
  const answer = arguments[0][path.split("?")[0]];
  return answer ? Promise.resolve(new Response(answer[1], { status: answer[0] })) : window.fetched(path, options);
};
"""


def refusal(status, code, message):
    return status, p.encode(p.Problem(code=code, message=message)).decode()


GATEWAY = (502, "<html>Bad Gateway</html>")
ELSE = "something else may stand between this page and the server"
REFUSED = [
    (503, "unavailable", "The server cannot answer now: the reason."),
    (429, "too_many", "asked too often: the reason."),
    (500, "internal", "The server answered 500 internal: the reason."),
]


@pytest.mark.long
def test_an_empty_server_and_problems_in_words(page):
    """With answers that the page gets in the place of the server's."""
    page.expected = ["404"]
    well = {
        "/v2/scopes": (200, p.encode(LISTED).decode()),
        "/v2/history": refusal(404, "unknown_route", "there is no such thing"),
    }

    def now(**changes):
        page.run(
            ANSWER, well | {f"/{name.replace('_', '/')}": one for name, one in changes.items()}
        )
        page.ask_now()

    with served(SERVE) as (place, _):
        for path, said in (
            ("scope/0:kv", "The server has no such scope."),
            ("scope/0:kv/key/a", "The server has no such scope."),
            ("", "No scope yet."),
        ):
            page.open(f"{place.url}/#/{path}")
            page.shows("p", said)
        now()
        shown = [SCOPE, "", "8", "0", "0", "0", "8", "0%", NONE, "0", "http://one:18000", "2 KiB"]
        page.until(lambda: page.table(TABLE) == [shown])
        assert page.all(f"{TABLE} td.shared")[0].is_displayed()
        page.shows("p", "This server keeps no history.")
        for status, code, words in REFUSED:
            now(v2_scopes=refusal(status, code, "the reason"))
            page.shows("#banner", words)
        for name in ("v2", "readyz"):
            now(**{name: GATEWAY})
            page.shows("#banner", ELSE)
        now()
        page.until(lambda: not page.all("#banner")[0].is_displayed())
        now(readyz=refusal(503, "unavailable", "changes could not be written: disk full"))
        page.shows(".health", "Not ready")
        page.shows(".health", "Changes could not be written: disk full.")
        now(readyz=refusal(503, "draining", "this server drains: it gives no new leases"))
        page.shows(".health", "This server drains: it gives no new leases.")
        now(v2=refusal(403, "forbidden", "this token permits nothing"))
        page.shows("h1", "This server asks for a token")
        page.enter("#token", f"x{Keys.ENTER}")
        page.shows(
            ".token [role=alert]",
            "This token is known and does not permit reading: this token permits nothing.",
        )
        page.run(ANSWER, well)
        page.enter("#token", f"y{Keys.ENTER}")
        page.until(lambda: page.all(TABLE))
