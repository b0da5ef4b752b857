#!/usr/bin/env python3
"""Screenshots of the status page: a server of its own, engines that ask it as a small cluster does,
and a headless Chromium.

usage: scripts/page_screenshots.py [--seconds S] [--out docs/images] [--only NAME ...]
"""

from __future__ import annotations

import argparse
import base64
import http.client
import io
import json
import math
import random
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from PIL import Image
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

from tests.support.metadata import Served

if TYPE_CHECKING:
    from collections.abc import Callable

SERVE: Final = (
    f'{sys.executable} -c "from hicache_storage.cli.main import main; main()" metadata serve '
    f"--port {{port}} "
    "--store sqlite:///{tmp}/m.db --lease-seconds 20"
)
GEOMETRY: Final = "page 64 tokens, 48 layers, fp8, page_first, tp 8"
IDENTITY: Final = "1f0c9a3be27d"
SCOPES: Final = {
    f"{rank}:{pool}-{IDENTITY}": (slots, slot_bytes)
    for rank in (0, 1)
    for pool, slots, slot_bytes in (
        ("kv", 48_000, 2_359_296),
        ("indexer", 48_000, 8_192),
        ("mamba", 3_000, 12_582_912),
    )
}
SHARED_PAGES: Final = 24
"""Of the system prompts, with which conversations begin."""


class Server:
    """Calls of one client."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        self._number = 0

    def call(self, path: str, message: dict[str, Any]) -> dict[str, Any]:
        """Ask a route, with a request id as an engine would draw one."""
        self._number += 1
        headers = {
            "Content-Type": "application/json",
            "X-Request-Id": f"prefill-{threading.get_native_id() % 10:02}-{self._number:06x}",
        }
        self._connection.request("POST", path, json.dumps(message), headers)
        response = self._connection.getresponse()
        body = response.read()
        return json.loads(body) if response.status == 200 else {}


class Engine:
    """A few hundred conversations that grow, and sometimes end."""

    def __init__(self, port: int, seed: int) -> None:
        self.server, self.chance, self.seed = Server(port), random.Random(seed), seed
        self.conversations: list[list[str]] = []

    def turn(self) -> None:
        """One more turn of a conversation: what is there is looked up, the rest written."""
        chance = self.chance
        if len(self.conversations) < 300 or chance.random() < 0.08:
            prompt = int(chance.paretovariate(1.1)) % 40
            self.conversations.append(
                [f"prompt{prompt}-{i:03}-{'e91c7f' * 6}" for i in range(SHARED_PAGES)]
            )
        keys = self.conversations[
            min(len(self.conversations) - 1, int(chance.expovariate(1 / 120)))
        ]
        known = len(keys)
        keys += [f"{chance.getrandbits(160):040x}" for _ in range(chance.randint(4, 40))]
        scopes = [scope for scope in SCOPES if scope.startswith(f"{self.seed % 2}:")]
        pages = {scope: keys[-1:] if "mamba" in scope else keys[-128:] for scope in scopes}
        asked = [
            {"scope": scope, "keys": keys[known - 1 : known] if "mamba" in scope else pages[scope]}
            for scope in scopes
        ]
        self.server.call("/v2/lookup", {"scopes": asked, "pin_seconds": 2.0})
        self.write(pages)
        if len(keys) > 700 or chance.random() < 0.02:
            self.conversations.remove(keys)

    def write(self, pages: dict[str, list[str]]) -> None:
        """Reserve what is missing and commit most of it; one in a hundred engines dies in
        between."""
        parts = [
            {"scope": scope, "keys": keys, "prefixes": ["", *keys[:-1]]}
            for scope, keys in pages.items()
        ]
        leased = self.server.call(
            "/v2/reserve", {"scopes": parts, "owner": f"host{self.seed:02}/tp{self.seed % 8}"}
        )
        if self.chance.random() < 0.01:
            return
        done = []
        for part, answer in zip(parts, leased.get("scopes", []), strict=False):
            leases = [lease for lease in answer["leases"] if lease]
            size = SCOPES[part["scope"]][1]
            sums = [self.chance.getrandbits(64) for _ in leases]
            done.append(
                {
                    "scope": part["scope"],
                    "leases": leases,
                    "lengths": [size] * len(leases),
                    "checksums": sums,
                }
            )
        self.server.call("/v2/commit", {"scopes": done})

    def forget(self) -> None:
        """What an operator does now and then: delete a conversation."""
        keys = self.conversations.pop(self.chance.randrange(len(self.conversations)))
        for scope in SCOPES:
            self.server.call("/v2/delete", {"scopes": [{"scope": scope, "keys": keys}]})


class Load:
    """Engines that work at a rate which goes up and down; ended by `stop`."""

    def __init__(self, port: int) -> None:
        self._port, self._stop = port, threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(seed,)) for seed in range(2)]
        server = Server(port)
        for scope, (slots, slot_bytes) in SCOPES.items():
            made = {
                "scope": scope,
                "slots": slots,
                "slot_bytes": slot_bytes,
                "geometry": GEOMETRY,
                "identity": IDENTITY,
            }
            server.call("/v2/initialize", {"scopes": [made]})

    def start(self) -> None:
        """Fill the cache at full speed, then begin."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End it."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, seed: int) -> None:
        engine, begin = Engine(self._port, seed), time.monotonic()
        while not self._stop.is_set():
            engine.turn()
            if engine.chance.random() < 0.004:
                engine.forget()
            wave = (
                1
                + 0.6 * math.sin((time.monotonic() - begin) / 70 + seed)
                + (0.9 if (time.monotonic() - begin) % 190 < 20 else 0)
            )
            self._stop.wait(engine.chance.expovariate(14 * wave))


class Camera:
    """A browser that takes pictures."""

    def __init__(self) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = "/usr/bin/chromium"
        for argument in (
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
        ):
            options.add_argument(argument)
        self.driver = webdriver.Chrome(options=options, service=Service("/usr/bin/chromedriver"))

        self.driver.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": True})

    def look(self, width: int) -> None:
        """Set the width of the window, and light colours."""
        self._size(width, 900)
        scheme = {"name": "prefers-color-scheme", "value": "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})

    def take(self, path: Path, *, most: int) -> None:
        """A picture of the page from its top, no higher than `most`."""
        width = self.driver.execute_script("return window.innerWidth")
        wide, high = self.driver.execute_script(
            "return [document.documentElement.scrollWidth, document.documentElement.scrollHeight]"
        )
        if wide > width:
            raise SystemExit(f"{path}: {wide} pixels in a window of {width}")
        self._size(width, min(most, high))
        time.sleep(0.5)
        picture = self.driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})["data"]
        # Few colours, and none of them a photograph's; also those of small things must stay what
        # they are.
        few = (
            Image.open(io.BytesIO(base64.b64decode(picture)))
            .convert("RGB")
            .quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        )
        few.save(path, optimize=True)
        print(f"{path}: {width} x {min(most, high)}, {path.stat().st_size / 1024:.0f} KiB")

    def wait(self, script: str) -> Any:
        """Until a script's result is true; returns it."""
        return WebDriverWait(self.driver, 30).until(lambda driver: driver.execute_script(script))

    def _size(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def shots(camera: Camera, url: str, out: Path) -> dict[str, Callable[[], None]]:
    """Every picture, by its name."""
    scope = next(iter(SCOPES))

    def overview() -> None:
        camera.look(1200)
        camera.driver.get(url)
        camera.wait("return document.querySelectorAll('.slowest tbody tr').length > 5")
        camera.take(out / "status-page-light.png", most=1180)

    def of_scope() -> None:
        camera.look(1200)
        camera.driver.get(f"{url}/#/scope/{scope}")
        camera.wait("return document.querySelectorAll('.slots tbody tr').length > 5")
        time.sleep(60)
        camera.take(out / "status-page-scope.png", most=1150)

    return {
        "scope": of_scope,
        "light": overview,
    }


def main() -> None:
    """Serve, load, and take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--seconds",
        type=float,
        default=630.0,
        help="how long the load goes on before the first picture",
    )
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    parser.add_argument("--only", nargs="*", default=[])
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    with Served(command=SERVE) as place:
        load = Load(place.port)
        load.start()
        camera = None
        try:
            time.sleep(given.seconds)
            camera = Camera()
            for name, take in shots(camera, place.url, given.out).items():
                if not given.only or name in given.only:
                    take()
        finally:
            if camera is not None:
                camera.driver.quit()
            load.stop()


if __name__ == "__main__":
    main()
