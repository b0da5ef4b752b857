"""A headless Chromium on the status page, with what it complained about and whom it asked."""

from __future__ import annotations

import json
from contextlib import contextmanager

from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

CHROMIUM, DRIVER = "/usr/bin/chromium", "/usr/bin/chromedriver"
WAIT_SECONDS = 30


class Browser:
    def __init__(self, driver):
        self.driver = driver
        self.operations = []
        """All that `requests` has told."""

    def open(self, url, *, width=1200, dark=False):
        self.size(width)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        # Otherwise another fragment of the same page would not load it anew.
        self.driver.get("about:blank")
        self.driver.get(url)

    def size(self, width, height=900):
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def all(self, selector):
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def texts(self, selector):
        """Of all elements at once, also of those that are scrolled away."""
        return self.run(
            "return [...document.querySelectorAll(arguments[0])].map((found) => found.textContent)",
            selector,
        )

    def text(self, selector):
        return "".join(self.texts(selector)[:1])

    def run(self, script, *arguments):
        return self.driver.execute_script(script, *arguments)

    def until(self, condition, what=""):
        # The page may put another element in the place of one that was just found.
        wait = WebDriverWait(
            self.driver,
            WAIT_SECONDS,
            poll_frequency=0.05,
            ignored_exceptions=[StaleElementReferenceException],
        )
        return wait.until(lambda _: condition(), what)

    def shows(self, selector, text):
        """Wait until an element has that text in it."""
        self.until(
            lambda: any(text in found for found in self.texts(selector)), f"{text!r} in {selector}"
        )

    def click(self, selector, text=None):
        """The first element that is shown, and has that text if one is given."""

        def clicked():
            found = next(
                (
                    one
                    for one in self.all(selector)
                    if one.is_displayed() and text in (None, one.text)
                ),
                None,
            )
            if found is not None:
                found.click()
            return found is not None

        self.until(clicked, f"{selector} {text or ''}")

    def enter(self, selector, text):
        def entered():
            field = next(iter(self.all(selector)), None)
            if field is not None:
                field.clear()
                field.send_keys(text)
            return field

        return self.until(entered, selector)

    def facts(self):
        """Terms and what stands beside them."""
        return dict(
            self.run(
                "return [...document.querySelectorAll('main dl > div')].map((fact) => "
                "[...fact.children].map((part) => part.textContent))"
            )
        )

    def ask_now(self):
        """Let the page ask its server before its time, as it does when its tab is looked at
        again."""
        self.run("document.dispatchEvent(new Event('visibilitychange'))")

    @property
    def fragment(self):
        return self.run("return location.hash")

    def complaints(self):
        """Errors that the console has shown since the last call."""
        return [
            entry["message"]
            for entry in self.driver.get_log("browser")
            if entry["level"] == "SEVERE"
        ]

    def requests(self):
        """Addresses that were asked for since the last call."""
        events = [
            json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")
        ]
        asked = [
            event["params"]["request"]["url"]
            for event in events
            if event["method"] == "Network.requestWillBeSent"
        ]
        self.operations += asked
        return asked


@contextmanager
def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    # Containers give it neither the right to a sandbox of its own nor a large /dev/shm.
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
