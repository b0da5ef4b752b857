"""The drawings of the concept pages. `python scripts/docs/diagrams.py` writes them to
docs/images."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from drawing import Drawing

if TYPE_CHECKING:
    from collections.abc import Callable

IMAGES: Final = Path(__file__).parents[2] / "docs" / "images"


def tiers() -> Drawing:
    """Three tiers, who moves pages between them, and what stands before a driver."""
    d = Drawing(860, 300, "Device, host and store, and what lies between them")
    d.box(10, 20, 180, 120, "L1: device", "pages in GPU memory", "one process, one rank", "some GB")
    d.box(
        270,
        20,
        180,
        120,
        "L2: host",
        "pages in pinned memory",
        "one process, one rank",
        "tens to hundreds of GB",
    )
    d.box(
        530,
        20,
        320,
        120,
        "L3: store",
        "objects: pages with an envelope",
        "shared between processes and nodes",
        "as large as its disks or memory",
        kind="k",
    )
    d.arrow((190, 70), (270, 70), label="streams", both=True)
    d.arrow((450, 70), (530, 70), label="this SDK", both=True)
    d.text(10, 182, "Inside the arrow on the right, from the engine to the store:", "h")
    for x, width, title, line in (
        (10, 150, "engine", "SGLang, vLLM, LMCache"),
        (180, 150, "bridge", "calls of that engine"),
        (350, 170, "layers", "deadline, breaker, stats"),
        (540, 150, "ObjectStorage", "contract, envelopes"),
        (710, 140, "driver", "file, hf3fs, mooncake"),
    ):
        d.box(x, 205, width, 60, title, line, kind="k" if title == "driver" else "b")
    for left, right in ((160, 180), (330, 350), (520, 540), (690, 710)):
        d.arrow((left, 235), (right, 235))
    return d


def engines() -> Drawing:
    """One driver under the bridges of three engines."""
    d = Drawing(860, 372, "Three engines, each with its bridge, one driver, and its stores")
    for x, engine, bridge, unit, keys in (
        (10, "SGLang", "SGLangBridge", "pages of a rank", "a prefix of keys"),
        (300, "vLLM", "HiCacheTier", "chunks of all ranks", "keys of groups, in any order"),
        (590, "LMCache", "HiCacheL2Adapter", "objects of a worker", "keys, each for itself"),
    ):
        d.box(x, 12, 260, 44, engine)
        d.text(x + 248, 34, "unpatched", "s r")
        d.arrow((x + 130, 56), (x + 130, 86))
        d.box(x, 86, 260, 80, bridge, unit, keys)
        d.arrow((x + 130, 166), (x + 130, 200))
    d.box(
        10,
        200,
        840,
        62,
        "one contract, and any driver",
        "identity, envelopes and checksums, deadlines, circuit breaker, counters: "
        "a hit is right, or it is not a hit; a fault is a miss",
    )
    for x, name, line in (
        (10, "file", "any directory, NFS, a 3FS mount"),
        (300, "hf3fs", "3FS, with a metadata server"),
        (590, "mooncake", "memory of many nodes"),
    ):
        d.arrow((x + 130, 262), (x + 130, 296))
        d.box(x, 296, 260, 64, name, line, kind="k")
    return d


def hits() -> Drawing:
    """A chain of eight pages in three pools, and where a request may go on."""
    d = Drawing(
        860,
        270,
        "Presence of eight pages in three pools, each pool's legal endpoints and the common hit",
    )
    d.text(250, 26, "page of the chain", "s")
    for page in range(8):
        d.text(270 + 45 * page, 48, str(page + 1), "s c")
    rows = (
        ("kv", "all_pages", (1, 1, 1, 1, 1, 1, 1, 0), "1 to 7"),
        ("indexer", "all_pages", (1, 1, 1, 1, 1, 1, 0, 0), "1 to 6"),
        ("mamba", "trailing_pages, one state", (0, 1, 0, 0, 1, 0, 0, 1), "2, 5, 8"),
    )
    for row, (pool, policy, there, legal) in enumerate(rows):
        y = 78 + 42 * row
        d.text(12, y + 1, pool, "h")
        d.text(75, y + 1, policy, "s")
        for page, on in enumerate(there):
            d.dot(270 + 45 * page, y - 4, on=bool(on))
        d.text(640, y + 1, f"legal: {legal}", "s")
    d.arrow((450, 236), (450, 182))
    d.text(12, 226, "common endpoints 2 and 5: the hit is 5,", "h")
    d.text(12, 244, "although six pages of KV and indexer are there", "s")
    d.text(470, 226, "the minimum of 7, 6 and 8 would be 6,", "s")
    d.text(470, 244, "where there is no state to go on from", "s")
    return d


def identity() -> Drawing:
    """What is hashed into the name of an object, and what an object is."""
    d = Drawing(
        860, 300, "From identity, pool, geometry and key to the name and the bytes of an object"
    )
    d.box(
        10,
        20,
        250,
        116,
        "identity",
        "model, revision, KV dtype, layout,",
        "page size, layers, TP, PP and CP",
        "rank and size, tenant, salt",
    )
    d.box(10, 150, 120, 70, "pool", "kv, mamba, ...")
    d.box(140, 150, 120, 70, "geometry", "page's lengths")
    d.box(10, 234, 250, 56, "key", "chained over the tokens before")
    d.box(
        330,
        70,
        210,
        84,
        "namespace",
        "a fingerprint of 16 bytes",
        "equal: bytes mean the same",
        kind="k",
    )
    d.arrow((260, 90), (330, 100))
    d.arrow((260, 176), (330, 136))
    d.box(330, 220, 210, 70, "object name", "namespace and digest of the key")
    d.arrow((260, 262), (330, 258))
    d.arrow((435, 154), (435, 220))
    d.box(600, 70, 250, 220, "object", kind="o")
    d.cell(615, 110, 220, 40, "component 0 (K)")
    d.cell(615, 154, 220, 40, "component 1 (V)")
    d.cell(615, 206, 220, 70, "", kind="k")
    d.text(725, 226, "envelope, 64 bytes", "s c")
    d.text(725, 243, "namespace, key, length,", "s c")
    d.text(725, 260, "generation, checksum", "s c")
    d.arrow((540, 255), (600, 255))
    return d


def slot_life() -> Drawing:
    """The states of a slot in the metadata server."""
    d = Drawing(860, 230, "A slot is free, leased, live or quarantined")
    for x, name, line in (
        (10, "free", "nobody's"),
        (300, "leased", "one writer's, for a time"),
        (620, "live", "one key's page"),
    ):
        d.box(x, 20, 180, 62, name, line, kind="k" if name == "live" else "b")
    d.box(300, 150, 180, 62, "quarantined", "rests: readers may be late")
    d.arrow((190, 51), (300, 51), label="reserve")
    d.arrow((480, 51), (620, 51), label="commit")
    d.arrow((390, 82), (390, 150))
    d.text(402, 120, "abort, expiry, clear", "s")
    d.arrow((710, 82), (710, 181), (480, 181))
    d.text(600, 172, "eviction, delete, clear", "s c")
    d.arrow((300, 181), (100, 181), (100, 82))
    d.text(195, 172, "time over, no pin", "s c")
    return d


def page_in_3fs() -> Drawing:
    """A set and a get of the 3FS driver, as requests between writer, server, file and reader."""
    d = Drawing(860, 400, "The calls of a set and of a get in 3FS")
    places = {"writer": 80, "server": 330, "file": 560, "reader": 790}
    titles = {
        "writer": "writer",
        "server": "metadata server",
        "file": "slots on the mount",
        "reader": "reader",
    }
    for name, x in places.items():
        d.cell(x - 68, 14, 136, 32, titles[name], kind="k" if name == "server" else "b")
        d.arrow((x, 46), (x, 390))
    for y, start, end, label in (
        (82, "writer", "server", "reserve keys: leases of slots"),
        (122, "writer", "file", "components and envelope, one vectored write"),
        (162, "writer", "server", "commit length, checksum"),
        (222, "reader", "server", "lookup: slot, generation, length, checksum"),
        (262, "reader", "file", "read the slot"),
        (342, "reader", "server", "only if they differ: look up again"),
    ):
        x1, x2 = places[start], places[end]
        d.arrow((x1, y), (x2, y))
        d.text((x1 + x2) // 2, y - 7, label, "s c")
    d.text(90, 190, "from here on the page exists", "s")
    d.text(780, 296, "envelope, checksum and the server's answer", "s r")
    d.text(780, 312, "agree: a hit", "s r")
    d.text(780, 372, "four times at most; then a miss", "s r")
    return d


def hybrid() -> Drawing:
    """Pools of a hybrid model on every tier, and who moves them."""
    d = Drawing(860, 310, "A hybrid model's pools on the device, on the host and in the store")
    for x, title in ((200, "device"), (430, "host"), (660, "store")):
        d.box(x, 14, 180, 190, title, kind="o")
    for row, (pool, lines) in enumerate(
        (
            ("kv", ("rows of tokens", "pages", "objects")),
            ("mamba", ("states at checkpoints", "states", "objects")),
            ("indexer", ("rows of tokens", "in KV's slots", "objects")),
        )
    ):
        y = 50 + 50 * row
        d.text(12, y + 24, pool, "h")
        for x, line in zip((212, 442, 672), lines, strict=True):
            d.cell(x, y, 156, 38, line, kind="k" if pool == "mamba" else "b")
        d.arrow((368, y + 19), (442, y + 19), both=True)
        d.arrow((598, y + 19), (672, y + 19), both=True)
    d.box(
        200,
        226,
        640,
        70,
        "one span, one decision",
        "the radix cache chooses the prefix; the controller moves all pools of it together",
        "and agrees with the other ranks where it ends",
    )
    d.arrow((405, 226), (405, 204))
    d.arrow((635, 226), (635, 204))
    return d


def architecture() -> Drawing:
    """Packages from the engine down to the stores, and where the conformance suite stands."""
    d = Drawing(
        860, 474, "Packages from the engine to the stores, and the conformance suite beside them"
    )
    d.text(10, 26, "engine", "s")
    d.box(110, 8, 160, 58, "unpatched", "SGLang, vLLM, LMCache")
    d.box(300, 8, 330, 58, "hicache_storage.hybrid", "radix cache, controller, stack builders")
    d.text(10, 110, "SDK", "s")
    d.box(110, 96, 160, 58, "engines", "a bridge for each")
    d.box(300, 96, 330, 58, "layers", "tracing, circuit breaker, deadline", kind="k")
    d.box(
        110,
        186,
        520,
        58,
        "objects: ObjectStorage",
        "contract, namespaces, envelopes, hit policies",
        kind="k",
    )
    d.text(10, 290, "drivers", "s")
    for x, name, line in (
        (110, "file", "bundles in a directory"),
        (290, "hf3fs", "slots of large files"),
        (470, "mooncake", "distributed memory"),
    ):
        d.box(x, 276, 160, 58, name, line, kind="k")
        d.arrow((x + 80, 244), (x + 80, 276))
    d.text(10, 395, "stores", "s")
    d.box(110, 380, 160, 80, "any directory", "local disk, NFS, FUSE")
    d.box(290, 380, 85, 80, "mount", "3FS, NFS")
    d.box(385, 380, 165, 80, "metadata server", "key to slot", "SQLite or Redis", kind="k")
    d.box(560, 380, 85, 80, "cluster", "Mooncake")
    d.arrow((190, 66), (190, 96))
    d.arrow((465, 66), (465, 96))
    d.arrow((270, 125), (300, 125))
    d.arrow((465, 154), (465, 186))
    d.arrow((190, 334), (190, 380))
    d.arrow((332, 334), (332, 380))
    d.arrow((420, 334), (450, 380))
    d.arrow((580, 334), (600, 380))
    d.box(
        690,
        96,
        160,
        238,
        "conformance suite",
        "plays the engine:",
        "processes, threads,",
        "host pools",
        kind="o",
    )
    d.text(702, 222, "injects faults below", "s")
    d.text(702, 239, "the driver: FUSE disk,", "s")
    d.text(702, 256, "TCP proxy, servers,", "s")
    d.text(702, 273, "driver methods", "s")
    d.arrow((690, 125), (630, 125))
    d.box(100, 370, 555, 100, "", kind="o")
    d.arrow((770, 334), (770, 420), (655, 420))
    return d


DRAWINGS: Final[dict[str, Callable[[], Drawing]]] = {
    "tiers": tiers,
    "engines": engines,
    "hits": hits,
    "identity": identity,
    "slot-life": slot_life,
    "page-in-3fs": page_in_3fs,
    "hybrid": hybrid,
    "architecture": architecture,
}

if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        (IMAGES / f"{name}.svg").write_text(draw().svg(), "utf-8")
