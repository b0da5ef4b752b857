"""Servers with one planted fault each in what they make of malformed and large requests."""

from __future__ import annotations

import socket
import time

from hicache_metadata_server import protocol as p
from tests.conformance.metadata.planting import plant
from tests.conformance.metadata.reference import Refused
from tests.conformance.metadata.reference_server import Handler, Handlers
from tests.conformance.metadata.reference_state import Scope


@plant("MD-REQ-1", field_fault="D16")
class BreaksOnBadJson(Handler):
    def posted(self):
        try:
            return super().posted()
        except Refused as refused:
            if refused.status == 400:
                raise Refused(500, "broken", "JSONDecodeError") from refused
            raise


@plant("MD-REQ-2", field_fault="D16")
class NamesNoField(Handlers):
    def execute(self, now, path, body, once):
        status, answer = super().execute(now, path, body, once)
        return status, p.Problem(
            code="invalid", message="bad request"
        ) if status == 422 and not path.startswith("/v2") else answer


@plant("MD-REQ-3", field_fault="D16")
class ReadsTextAsKeys(Handlers):
    def meaning(self, path, body):
        if isinstance(body, dict) and isinstance(body.get("keys"), str):
            body = {
                **body,
                "keys": [[key, ""] if "reserve" in path else key for key in body["keys"]],
            }
        return super().meaning(path, body)


@plant("MD-REQ-4")
class BreaksOnOtherRanks(Handlers):
    def meaning(self, path, body):
        rank = path.split("/")[1]
        if rank != "v2":
            float(rank)
        return super().meaning(path, body)

    def execute(self, *arguments):
        try:
            return super().execute(*arguments)
        except ValueError as error:
            return 500, p.Problem(code="broken", message=str(error))


@plant("MD-REQ-5")
class BreaksOnBigNumbers(Handlers):
    def meaning(self, path, body):
        if isinstance(body, dict) and 2**70 in body.values():
            raise Refused(500, "broken", "OverflowError")
        return super().meaning(path, body)


@plant("MD-HTTP-1")
class DropsTheConnection(Handler):
    def posted(self):
        try:
            return super().posted()
        except Refused as refused:
            if refused.status == 400:
                self.connection.shutdown(socket.SHUT_RDWR)
            raise


@plant("MD-BIG-2", field_fault="D16")
class SearchesItsFreeList(Scope):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.quarantine_seconds = 0.0

    def let_go(self, index, now):
        super().let_go(index, now)
        assert -1 not in self.free


LONG = 100_000
"""Bytes of a body from which on it takes these servers long to say what is wrong."""


@plant("MD-REQ-7")
class SearchesLongForWhatIsWrong(Handlers):
    def execute(self, now, path, body, once):
        status, answer = super().execute(now, path, body, once)
        if status == 422 and len(str(body)) > LONG:
            time.sleep(4)
        return status, answer


@plant("MD-REQ-7")
class TellsItsHealthWhenItHasTime(Handler):
    """No longer than a body of that size may take; but everybody waits for it."""

    def do_GET(self):
        with self.server.handlers.lock:
            pass
        super().do_GET()

    def say(self, status, message):
        if status == 422 and int(self.headers.get("Content-Length") or 0) > LONG:
            with self.server.handlers.lock:
                time.sleep(1.5)
        super().say(status, message)


@plant("MD-AUTH-3")
class TakesOrdersFromAnyPage(Handler):
    def foreign(self):
        return (
            super().foreign()
            if "Origin" not in self.headers and "Sec-Fetch-Site" not in self.headers
            else ""
        )


@plant("MD-AUTH-3")
class AnswersToAnyName(Handler):
    def foreign(self):
        field = super().foreign()
        return "" if field == "Host" else field


@plant("MD-AUTH-3")
class ReadsWhatFormsSend(Handler):
    def content_type(self):
        found = super().content_type()
        return found if self.path.startswith("/v2") else p.JSON
