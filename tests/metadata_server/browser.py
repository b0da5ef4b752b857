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
WAIT_SECONDS = 120


class Browser:
    """Asks the page again and again until it shows what a test waits for."""

    def __init__(self, driver):
        self.driver = driver

    def open(self, url, *, width=1200):
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        # Otherwise another fragment of the same page would not load it anew.
        self.driver.get("about:blank")
        self.driver.get(url)

    def all(self, selector):
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def texts(self, selector):
        """Of all elements at once, also of those that are scrolled away."""
        return ["".join(parts) for parts in self.table(selector)]

    def table(self, selector):
        """Texts of the cells of rows."""
        script = """return [...document.querySelectorAll(arguments[0])].map((row) =>
            [...row.childNodes].map((cell) => cell.textContent))"""
        return self.run(script, selector)

    def facts(self):
        """Terms and what stands beside them."""
        return dict(self.table("main dl > div"))

    def run(self, script, *arguments):
        return self.driver.execute_script(script, *arguments)

    def until(self, condition, what=""):
        # The page may put another element in the place of one that was just found.
        stale = [StaleElementReferenceException]
        wait = WebDriverWait(self.driver, WAIT_SECONDS, 0.1, ignored_exceptions=stale)
        return wait.until(lambda _: condition(), what)

    def shows(self, selector, text):
        """Wait until an element has that text in it."""
        self.until(
            lambda: any(text in found for found in self.texts(selector)), f"{text!r} in {selector}"
        )

    def has(self, selector, count):
        """Wait until there are so many elements."""
        self.until(lambda: len(self.all(selector)) == count, f"{count} {selector}")

    def click(self, selector, text=None):
        """The first element that is shown, and has that text if one is given."""

        def clicked():
            for one in self.all(selector):
                if one.is_displayed() and text in (None, one.text):
                    one.click()
                    return True
            return False

        self.until(clicked, f"{selector} {text or ''}")

    def enter(self, selector, text):
        self.has(selector, 1)
        [field] = self.all(selector)
        field.clear()
        field.send_keys(text)

    def complaints(self):
        """Errors that the console has shown since the last call."""
        told = self.driver.get_log("browser")
        return [entry["message"] for entry in told if entry["level"] == "SEVERE"]

    def requests(self):
        """Addresses that were asked for since the last call."""
        told = self.driver.get_log("performance")
        events = [json.loads(entry["message"])["message"] for entry in told]
        return [
            event["params"]["request"]["url"]
            for event in events
            if event["method"] == "Network.requestWillBeSent"
        ]


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
