"""A metadata server that keeps the protocol, in memory and a journal: `docs/metadata-protocol.md` as a program.

`python -m tests.conformance.metadata.reference --port 18000 --journal FILE` serves it. Every request that changes anything stands in the
journal, with its time, before it is answered; a start replays the journal, so that all that was answered is as it was.
"""

from __future__ import annotations

import argparse
import json
import re
import secrets
import sys
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from hicache_metadata_server import protocol as p
from tests.conformance.metadata.reference_state import Scope

LIMITS = p.Limits(
    body_bytes=4_000_000, keys=20_000, scopes=16, key_bytes=1024, lease_seconds=3, least_lease_seconds=0.2, most_lease_seconds=60,
    most_pin_seconds=30, quarantine_seconds=0.2, idempotency_seconds=60,
)  # fmt: skip


class Refused(Exception):
    def __init__(self, status: int, code: str, message: str, field: str = "") -> None:
        super().__init__(message)
        self.status, self.problem = status, p.Problem(code=code, message=message, field=field)


@dataclass
class Reference:
    """The operations of the protocol; each is called with the time at which it happens."""

    kind_of_scope: ClassVar[type[Scope]] = Scope
    limits: p.Limits = LIMITS
    durability: p.Durability = p.Durability.NONE
    scopes: dict[str, Scope] = field(default_factory=dict)
    instance: str = field(default_factory=lambda: secrets.token_hex(8))
    next_lease: int = 1
    next_pin: int = 1
    draining: bool = False
    kept: dict[str, tuple[float, bytes, Any]] = field(default_factory=dict)

    def scope(self, name: str, now: float, where: str = "namespace") -> Scope:
        if name not in self.scopes:
            raise Refused(404, "unknown_scope", f"scope {name!r} is not initialized", where)
        self.scopes[name].settle(now)
        return self.scopes[name]

    def all_scopes(self, request: Any, now: float) -> list[tuple[Any, Scope]]:
        """The scopes of a request, before anything is done to any."""
        return [(part, self.scope(part.scope, now, f"scopes[{i}].scope")) for i, part in enumerate(request.scopes)]

    def check_limits(self, request: Any) -> None:
        parts = getattr(request, "scopes", [])
        if len(parts) > self.limits.scopes:
            raise Refused(413, "too_large", f"{len(parts)} scopes, {self.limits.scopes} is the limit", "scopes")
        lists = [(f"scopes[{i}].", part) for i, part in enumerate(parts) if not isinstance(part, str)] or [("", request)]
        seen = 0
        for where, part in lists:
            for name in ("keys", "leases", "written_keys_to_confirm", "pages_to_release"):
                entries = getattr(part, name, [])
                seen += len(entries)
                if seen > self.limits.keys:
                    raise Refused(413, "too_large", f"more than {self.limits.keys} entries", where + name)
                for i, entry in enumerate(entries):
                    key = entry if isinstance(entry, str) else entry[0] if isinstance(entry, tuple) else ""
                    if len(key.encode("utf-8", "surrogatepass")) > self.limits.key_bytes:
                        raise Refused(422, "invalid", f"a key of more than {self.limits.key_bytes} bytes", f"{where}{name}[{i}]")
            for name in ("prefixes", "generations", "lengths", "checksums"):
                column, rows = getattr(part, name, None), len(getattr(part, "leases", None) or getattr(part, "keys", ()))
                if column is not None and len(column) != rows and (column or name in ("lengths", "checksums")):
                    raise Refused(422, "invalid", f"{len(column)} entries for {rows}", where + name)

    def lease_seconds(self, wish: float | None) -> float:
        return min(max(wish or self.limits.lease_seconds, self.limits.least_lease_seconds), self.limits.most_lease_seconds)

    # The native part.

    def initialize(self, request: p.Initialize, now: float) -> p.Initialized:
        for i, wanted in enumerate(request.scopes):
            known = self.scopes[wanted.scope].geometry if wanted.scope in self.scopes else wanted
            for name in ("slots", "slot_bytes", "geometry", "identity"):
                if getattr(known, name) != getattr(wanted, name):
                    message = f"scope {wanted.scope!r} has {name} {getattr(known, name)!r}, not {getattr(wanted, name)!r}"
                    raise Refused(409, "mismatch", message, f"scopes[{i}].{name}")
        created = [wanted.scope not in self.scopes for wanted in request.scopes]
        for wanted in request.scopes:
            self.scopes.setdefault(wanted.scope, self.kind_of_scope(wanted, self.limits.quarantine_seconds))
        return p.Initialized(created=created)

    def lookup(self, request: p.Lookup, now: float) -> p.LookedUp:
        seconds = min(request.pin_seconds, self.limits.most_pin_seconds)
        pin, found = (self.next_pin, list[p.Found]()) if seconds else (0, [])
        self.next_pin += 1
        for part, scope in self.all_scopes(request, now):
            indices = [scope.live.get(key, p.NO_SLOT) for key in part.keys]
            slots = [scope.slots[index] if index >= 0 else None for index in indices]
            if request.touch:
                scope.touch(part.keys)
            if pin:
                for slot in filter(None, slots):
                    slot.pins[pin] = now + seconds
            found.append(
                p.Found(
                    slots=indices,
                    generations=[slot.generation if slot else 0 for slot in slots],
                    lengths=[slot.length if slot else 0 for slot in slots],
                    checksums=[slot.checksum if slot else 0 for slot in slots],
                )
            )
        return p.LookedUp(scopes=found, pin=pin, pin_seconds=seconds)

    def reserve(self, request: p.Reserve, now: float) -> p.Leases:
        if self.draining:
            raise Refused(503, "draining", "this server gives no new leases")
        seconds = self.lease_seconds(request.lease_seconds)
        answers = list[p.Leased]()
        for part, scope in self.all_scopes(request, now):
            pairs = list(zip(part.keys, part.prefixes or [""] * len(part.keys), strict=True))
            states = self.reserve_in(scope, pairs, request.owner, now, seconds)
            known = {p.Reserved.LEASED: scope.leasing, p.Reserved.EXISTS: scope.live}
            slots = [known[state][key] if state in known else p.NO_SLOT for key, state in zip(part.keys, states, strict=True)]
            leased = [
                scope.slots[slot] if state is p.Reserved.LEASED else None for slot, state in zip(slots, states, strict=True)
            ]
            answers.append(
                p.Leased(
                    states=states, slots=slots, generations=[scope.slots[slot].generation if slot >= 0 else 0 for slot in slots],
                    leases=[slot.lease if slot else 0 for slot in leased],
                )
            )  # fmt: skip
        return p.Leases(scopes=answers, lease_seconds=seconds)

    def reserve_in(self, scope: Scope, pairs: list[tuple[str, str]], owner: str, now: float, seconds: float) -> list[p.Reserved]:
        states = scope.reserve(pairs, owner, self.next_lease, now, now + seconds)
        self.next_lease += len(pairs)
        return states

    def commit(self, request: p.Commit, now: float) -> p.SettledLeases:
        parts = self.all_scopes(request, now)
        for i, (part, scope) in enumerate(parts):
            for j, length in enumerate(part.lengths):
                if 0 < scope.geometry.slot_bytes < length:
                    raise Refused(422, "invalid", f"{length} bytes in slots of fewer", f"scopes[{i}].lengths[{j}]")
        return _settled([[self.commit_one(scope, *row, now) for row in zip(part.leases, part.lengths, part.checksums, strict=True)]
                         for part, scope in parts])  # fmt: skip

    def commit_one(self, scope: Scope, lease: int, length: int, checksum: int, now: float) -> bool:
        if lease not in scope.leases:
            again = scope.committed(lease)
            return again is not None and (scope.slots[again].length, scope.slots[again].checksum) == (length, checksum)
        scope.commit(scope.leases[lease], length, checksum)
        return True

    def abort(self, request: p.Abort, now: float) -> p.SettledLeases:
        return _settled(
            [[self.abort_one(scope, lease, now) for lease in part.leases] for part, scope in self.all_scopes(request, now)]
        )

    def abort_one(self, scope: Scope, lease: int, now: float) -> bool:
        if lease not in scope.leases:
            return False
        scope.let_go(scope.leases[lease], now)
        return True

    def renew(self, request: p.Renew, now: float) -> p.SettledLeases:
        until = now + self.lease_seconds(request.lease_seconds)
        return _settled(
            [[self.renew_one(scope, lease, until) for lease in part.leases] for part, scope in self.all_scopes(request, now)]
        )

    def renew_one(self, scope: Scope, lease: int, until: float) -> bool:
        if lease not in scope.leases:
            return False
        scope.end_at(scope.leases[lease], until)
        return True

    def unpin(self, request: p.Unpin, now: float) -> None:
        for scope in self.scopes.values():
            scope.unpin(request.pins, now)

    def touch(self, request: p.Touch, now: float) -> p.Marked:
        parts = self.all_scopes(request, now)
        for part, scope in parts:
            scope.touch(part.keys)
        return p.Marked(scopes=[p.Flags(done=[key in scope.live for key in part.keys]) for part, scope in parts])

    def delete(self, request: p.Delete, now: float) -> p.Marked:
        flags = list[p.Flags]()
        for part, scope in self.all_scopes(request, now):
            done = list[bool]()
            for i, key in enumerate(part.keys):
                index = scope.live.get(key, p.NO_SLOT)
                meant = not part.generations or (index >= 0 and scope.slots[index].generation == part.generations[i])
                done.append(meant and scope.delete(key, now))
            flags.append(p.Flags(done=done))
        return p.Marked(scopes=flags)

    def clear(self, request: p.Clear, now: float) -> p.Cleared:
        scopes = [self.scope(name, now, f"scopes[{i}]") for i, name in enumerate(request.scopes)]
        return p.Cleared(pages=[scope.clear(now) for scope in scopes])

    def list_scopes(self, now: float) -> p.Scopes:
        return p.Scopes(scopes=[
            p.ScopeStatus(
                scope=name, slots=len(scope.slots), slot_bytes=scope.geometry.slot_bytes, geometry=scope.geometry.geometry,
                identity=scope.geometry.identity, **{str(state): scope.count(state) for state in p.SlotState},
            )
            for name, scope in ((name, self.scope(name, now)) for name in sorted(self.scopes))
        ])  # fmt: skip

    def inspect(self, request: p.Inspect, now: float) -> p.Inspected:
        scope = self.scope(request.scope, now, "scope")
        for i, slot in enumerate(request.slots):
            if slot >= len(scope.slots):
                raise Refused(422, "invalid", f"there are {len(scope.slots)} slots", f"slots[{i}]")
        indices = [*request.slots, *(scope.live.get(key, scope.leasing.get(key, p.NO_SLOT)) for key in request.keys)]
        return p.Inspected(slots=[self.status(scope, index, now) if index >= 0 else None for index in indices])

    def status(self, scope: Scope, index: int, now: float) -> p.SlotStatus:
        slot = scope.slots[index]
        owned, timed = (
            slot.state in (p.SlotState.LEASED, p.SlotState.LIVE),
            slot.state in (p.SlotState.LEASED, p.SlotState.QUARANTINED),
        )
        live = slot.state is p.SlotState.LIVE
        return p.SlotStatus(
            slot=index, state=slot.state, generation=slot.generation, key=slot.key if owned else "", prefix=slot.prefix if owned else "",
            length=slot.length if live else 0, checksum=slot.checksum if live else 0, owner=slot.owner,
            seconds_left=max(0.0, slot.until - now) if timed else 0.0, pins=sum(end > now for end in slot.pins.values()),
        )  # fmt: skip

    def fsck(self, request: p.Fsck, now: float) -> p.Checked:
        scopes = {name: self.scope(name, now, f"scopes[{i}]") for i, name in enumerate(request.scopes or self.scopes)}
        return p.Checked(
            slots=sum(len(scope.slots) for scope in scopes.values()),
            problems=[f"{name}: {problem}" for name, scope in scopes.items() for problem in scope.problems()],
        )

    def drain(self, request: p.Drain, now: float) -> p.Draining:
        self.draining = request.enabled
        return p.Draining(enabled=request.enabled, leases=sum(len(self.scope(name, now).leases) for name in self.scopes))

    # The compatible part.

    def compatible(self, rank: int, operation: str, request: Any, now: float) -> dict[str, Any] | None:
        name = f"{rank}:{request.namespace}"
        if operation == "initialize":
            return self.compatible_initialize(name, request.num_pages)
        scope = self.scope(name, now)
        match operation:
            case "exists":
                scope.touch(request.keys)
                return {"exists": [key in scope.live for key in request.keys]}
            case "get_page_indices":
                scope.touch(request.keys)
                return {"indices": [scope.live.get(key) for key in request.keys]}
            case "reserve_and_allocate_page_indices":
                seconds = self.limits.lease_seconds
                full = [p.Reserved.FULL] * len(request.keys)
                states = full if self.draining else self.reserve_in(scope, request.keys, "", now, seconds)
                known = {p.Reserved.LEASED: scope.leasing, p.Reserved.EXISTS: scope.live}
                return {"indices": [(state is p.Reserved.EXISTS, known[state][key] if state in known else p.NO_SLOT)
                                    for (key, _), state in zip(request.keys, states, strict=True)]}  # fmt: skip
            case "confirm_write":
                return self.confirm(scope, request.written_keys_to_confirm, request.pages_to_release, now)
            case "delete_keys":
                for key in request.keys:
                    scope.delete(key, now)
            case "clear":
                scope.clear(now)
        return None

    def compatible_initialize(self, name: str, slots: int) -> None:
        known = self.scopes.get(name)
        if known and len(known.slots) != slots:
            raise Refused(409, "mismatch", f"scope {name!r} has {len(known.slots)} pages, not {slots}", "num_pages")
        if not known:
            self.scopes[name] = self.kind_of_scope(p.ScopeGeometry(scope=name, slots=slots), self.limits.quarantine_seconds)

    def confirm(self, scope: Scope, written: list[tuple[str, int]], released: list[int], now: float) -> None:
        for where, indices in (("written_keys_to_confirm", [index for _, index in written]), ("pages_to_release", released)):
            for i, index in enumerate(indices):
                if index >= len(scope.slots):
                    raise Refused(422, "invalid", f"there are {len(scope.slots)} pages", f"{where}[{i}]")
        refused = ""
        for i, (key, index) in enumerate(written):
            if not self.confirm_one(scope, key, index):
                refused = refused or f"written_keys_to_confirm[{i}]"
        for i, index in enumerate(released):
            if not self.release_one(scope, index, now):
                refused = refused or f"pages_to_release[{i}]"
        if refused:
            raise Refused(409, "stale", "that slot is not reserved for that key", refused)

    def confirm_one(self, scope: Scope, key: str, index: int) -> bool:
        if scope.leasing.get(key) != index:
            return scope.live.get(key) == index
        scope.commit(index, 0, 0)
        return True

    def release_one(self, scope: Scope, index: int, now: float) -> bool:
        state = scope.slots[index].state
        if state is p.SlotState.LEASED:
            scope.let_go(index, now)
        return state is not p.SlotState.LIVE


def _settled(done: list[list[bool]]) -> p.SettledLeases:
    states = {True: p.Settled.DONE, False: p.Settled.STALE}
    return p.SettledLeases(scopes=[p.SettledScope(states=[states[flag] for flag in flags]) for flags in done])


class Desk:
    """From a path and a body to a status and a message: limits, idempotency keys, the journal."""

    def __init__(self, reference: Reference, journal: Path | None = None) -> None:
        self.reference, self.lock, self.journal = reference, threading.Lock(), None
        if journal:
            for line in journal.read_text().splitlines() if journal.exists() else []:
                now, *call = json.loads(line)
                self.execute(now, *call)
            self.journal = journal.open("a", buffering=1)

    def call(self, path: str, body: Any, once: str) -> tuple[int, Any]:
        """Do what a request asks for, and write it down first."""
        with self.lock:
            now = time.time()
            if self.journal:
                self.journal.write(msgspec.json.encode([now, path, body, once]).decode() + "\n")
            return self.execute(now, path, body, once)

    def execute(self, now: float, path: str, body: Any, once: str) -> tuple[int, Any]:
        try:
            run, request = self.meaning(path, body)
            self.reference.check_limits(request)
            if not once:
                return self.perform(run, request, now)
            said = msgspec.json.encode((path, body), order="deterministic")
            until, before, answer = self.reference.kept.get(once, (0.0, b"", None))
            if until <= now:
                answer = self.perform(run, request, now)
                self.remember(once, now + self.reference.limits.idempotency_seconds, said, answer)
            elif before != said:
                raise Refused(422, "key_reused", "this idempotency key belongs to another request", p.IDEMPOTENCY_HEADER)
        except Refused as refused:
            return refused.status, refused.problem
        return answer

    def perform(self, run: Any, request: Any, now: float) -> tuple[int, Any]:
        answer = run(request, now)
        return (204, None) if answer is None else (200, answer)

    def remember(self, once: str, until: float, said: bytes, answer: tuple[int, Any]) -> None:
        self.reference.kept[once] = (until, said, answer)

    def meaning(self, path: str, body: Any) -> tuple[Any, Any]:
        """What to run, and its typed request."""
        reference = self.reference
        if path in p.ROUTES:
            route = p.ROUTES[path]
            if route.method == "GET":
                return (lambda _, now: reference.list_scopes(now)) if path == "/v2/scopes" else (lambda *_: self.about()), None
            return getattr(reference, path.rpartition("/")[2]), convert(body, route.request)
        match = re.fullmatch(r"/([^/]+)/([a-z_]+)", path)
        if not match or match[2] not in p.COMPATIBLE_ROUTES:
            raise Refused(404, "unknown_route", f"there is no {path}")
        if not re.fullmatch(r"[0-9]{1,9}", match[1]):
            raise Refused(422, "invalid", f"a rank is a natural number, not {match[1]!r}", "rank")
        kind = p.COMPATIBLE_ROUTES[match[2]][0]
        return (lambda request, now: reference.compatible(int(match[1]), match[2], request, now)), convert(body, kind)

    def about(self) -> p.About:
        reference = self.reference
        return p.About(
            protocol=p.PROTOCOL, server="reference 1", instance=reference.instance, durability=reference.durability, limits=reference.limits
        )  # fmt: skip


def convert(body: Any, kind: Any) -> Any:
    """A request of that type, or a refusal that names the field."""
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `$")
        missing = re.search(r"(?:field|required field) `(\w+)`", message)
        where = ".".join(filter(None, [place.strip("`.").replace("[...]", ""), missing[1] if missing else ""]))
        raise Refused(422, "invalid", str(error), where) from error


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: ReferenceServer

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.path in ("/healthz", "/readyz"):
            self.say(503 if self.path == "/readyz" and self.server.desk.reference.draining else 200, {"status": "ok"})
        elif self.path == "/metrics":
            self.guarded(lambda: (200, self.metrics()))
        else:
            self.guarded(lambda: self.server.desk.call(self.path, None, ""))

    def do_POST(self) -> None:
        self.guarded(self.posted)

    def posted(self) -> tuple[int, Any]:
        length = int(self.headers.get("Content-Length") or 0)
        if length > self.server.desk.reference.limits.body_bytes:
            self.close_connection = True
            raise Refused(413, "too_large", f"a body of {length} bytes", "body")
        raw, native = self.rfile.read(length), self.path.startswith("/v2")
        try:
            if native and self.content_type() not in (p.JSON, p.MSGPACK):
                raise Refused(415, "media_type", f"{p.JSON} or {p.MSGPACK}", "Content-Type")
            body = p.decode(raw, Any, self.content_type() if native else p.JSON)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise Refused(400, "malformed", f"the body cannot be read: {error}", "body") from error
        once = self.headers.get(p.IDEMPOTENCY_HEADER, "")
        return self.server.desk.call(self.path, body, once if self.path in p.ROUTES and p.ROUTES[self.path].changes else "")

    def guarded(self, act: Any) -> None:
        try:
            if not self.may():
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                have = self.server.tokens.get(self.bearer())
                raise Refused(
                    *((403, "forbidden") if have else (401, "unauthorized")), "this token does not permit that", "Authorization"
                )
            self.say(*act())
        except Refused as refused:
            self.say(refused.status, refused.problem)

    def may(self) -> bool:
        if not self.server.tokens:
            return True
        needed = (
            p.ROUTES[self.path].token
            if self.path in p.ROUTES
            else p.COMPATIBLE_ROUTES.get(self.path.rpartition("/")[2], (None, p.Token.READ))[1]
        )
        order = list(p.Token)
        return order.index(self.server.tokens.get(self.bearer(), p.Token.NONE)) >= order.index(needed)

    def bearer(self) -> str:
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    def content_type(self) -> str:
        return self.headers.get("Content-Type", p.JSON).partition(";")[0].strip().lower()

    def metrics(self) -> str:
        lines = ["# TYPE hicache_metadata_slots gauge"]
        for scope in self.server.desk.call("/v2/scopes", None, "")[1].scopes:
            lines += [
                f'hicache_metadata_slots{{scope="{scope.scope}",state="{state}"}} {getattr(scope, state)}'
                for state in p.SlotState
            ]
        return "\n".join(lines) + "\n"

    def say(self, status: int, message: Any) -> None:
        kind = p.MSGPACK if self.content_type() == p.MSGPACK and self.path.startswith("/v2") else p.JSON
        text = isinstance(message, str)
        body = b"" if message is None else message.encode() if text else p.encode(message, kind)
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; version=0.0.4" if text else kind)
        self.send_header("Content-Length", str(len(body)))
        self._headers_buffer.append(b"\r\n" + body)
        self.flush_headers()


class ReferenceServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self, desk: Desk, port: int = 0, tokens: dict[str, p.Token] | None = None, handler: type[Handler] = Handler
    ) -> None:
        self.desk, self.tokens = desk, tokens or {}
        super().__init__(("127.0.0.1", port), handler)

    def handle_error(self, *_: Any) -> None:
        """A client that goes away is no error."""


def serve(arguments: list[str]) -> None:
    """Run one until it is killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--journal", type=Path)
    parser.add_argument("--fault", default="", help="one of those in faulty.py")
    options = parser.parse_args(arguments)
    from tests.conformance.metadata.faulty import server

    durability = p.Durability.PROCESS if options.journal else p.Durability.NONE
    server(options.fault, port=options.port, journal=options.journal, durability=durability).serve_forever()


if __name__ == "__main__":
    serve(sys.argv[1:])
