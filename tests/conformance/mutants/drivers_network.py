"""Right drivers of one server and of several, made of small steps."""

from __future__ import annotations

import hashlib
import socket
import sys
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

import msgspec
import xxhash
from drivers_files import BUFFERED
from drivers_server import message, received

from hicache_storage.objects import Call, ObjectStorage
from hicache_storage.spec import (
    DriverConfig,
    StorageTimeoutError,
    StorageUnavailableError,
)

ACROSS = replace(BUFFERED, networked=True)
SPREAD = replace(ACROSS, deletes=False, clears=False)
MEMBERS = ("a", "b", "c")
CONNECT_SECONDS = 2.0
REQUEST_SECONDS = 0.4
REST_SECONDS = 1.0
"""How long a server that has failed is left out."""
FAULTS = (OSError, StorageUnavailableError, StorageTimeoutError)


def _server(port):
    server = Path(__file__).with_name("drivers_server.py")
    return (sys.executable, "-P", str(server), f"{{port:{port}}}", f"{{tmp}}/{port}.log")


class NetworkedConfig(DriverConfig, frozen=True, kw_only=True):
    port: int | str


class Networked(ObjectStorage):
    """Keeps pages on a server.

    Each call is one request on a connection that is kept for the next.
    """

    promises = ACROSS
    spec = MappingProxyType(
        {
            "config": "drivers_network:NetworkedConfig",
            "trial_config": {"port": "{port:pages}"},
            "trial_services": (_server("pages"),),
        }
    )

    def __init__(self, identity, config):
        super().__init__(identity, driver_name=type(self).__name__, capabilities=self.promises)
        self.port = int(config.port)
        self.idle = []
        self.lock = threading.Lock()
        self.gone = False

    # Steps that a fault replaces
    # ---------------------------------------------------------------------------------

    def fresh(self, call):
        return socket.create_connection(("127.0.0.1", self.port), timeout=self.seconds(call))

    def seconds(self, call):
        return call.timeout(30.0)

    def talk(self, connection, call, request):
        connection.settimeout(self.seconds(call))
        connection.sendall(message(request))
        answer = received(connection.recv)
        if answer is None:
            raise ConnectionError("the server has closed the connection")
        return answer

    def asked(self, call, *request):
        """One request; on a new connection where the old one turns out to be dead."""
        kept = self.taken()
        if kept is not None:
            try:
                return self.given_back(kept, self.talk(kept, call, request))
            except (OSError, msgspec.DecodeError):
                kept.close()
            except BaseException:
                kept.close()
                raise
        if call.expired():
            raise StorageTimeoutError("the server did not answer in time")
        connection = self.fresh(call)
        try:
            return self.given_back(connection, self.talk(connection, call, request))
        except (OSError, msgspec.DecodeError) as error:
            connection.close()
            raise StorageUnavailableError(f"no answer from the server: {error}") from error

    def taken(self):
        with self.lock:
            return self.idle.pop() if self.idle else None

    def given_back(self, connection, answer):
        with self.lock:
            if not self.gone:
                self.idle.append(connection)
                return answer
        connection.close()
        return answer

    # The driver
    # --------------------------------------------------------------------------------------------------

    def connect(self):
        self.asked(Call(CONNECT_SECONDS), "exists", [])

    def disconnect(self):
        with self.lock:
            self.gone = True
            idle = self.idle
            self.idle = []
        for connection in idle:
            connection.close()

    def objects_exist(self, batches, call):
        names = [[name_of(batch.namespace, key) for key in batch.keys] for batch in batches]
        return split(self.asked(call, "exists", joined(names)), names)

    def read_objects(self, batches, call):
        names = [[name_of(batch.namespace, read.key) for read in batch.reads] for batch in batches]
        pages = split(self.asked(call, "get", joined(names)), names)
        return [
            [read.fill(page) for read, page in zip(batch.reads, some, strict=True)]
            for batch, some in zip(batches, pages, strict=True)
        ]

    def write_objects(self, batches, call):
        writes = [
            [(name_of(batch.namespace, write.key), write) for write in batch.writes]
            for batch in batches
        ]
        return split(self.put(joined(writes), call), writes)

    def put(self, writes, call):
        pages = [(name, write.tobytes()) for name, write in writes]
        if call.expired():
            raise StorageTimeoutError("too late to store anything")
        return self.asked(call, "put", pages, [name for name, write in writes if write.replaces])

    def discard_objects(self, batches, call):
        for batch in batches:
            names = [name_of(batch.namespace, read.key) for read in batch.reads]
            found = zip(names, batch.reads, self.asked(call, "get", names), strict=True)
            # What is dropped is what was looked at, and not what somebody puts in its place
            # meanwhile.
            damaged = [
                (name, page)
                for name, read, page in found
                if page is not None and read.has_read(page)
            ]
            self.asked(call, "drop", damaged)
        return True

    def delete_objects(self, batches, call):
        names = [[name_of(batch.namespace, key) for key in batch.keys] for batch in batches]
        return split(self.asked(call, "delete", joined(names)), names)

    def clear_namespaces(self, namespaces, call):
        for namespace in namespaces:
            self.asked(call, "clear", f"{namespace.name}/")


def name_of(namespace, key):
    return f"{namespace.name}/{hashlib.blake2b(key.encode(), digest_size=20).hexdigest()}"


def joined(parts):
    return [item for part in parts for item in part]


def split(answers, shape):
    if len(answers) != sum(map(len, shape)):
        raise StorageUnavailableError("the server answered for another number of pages")
    told = iter(answers)
    return [[next(told) for _ in some] for some in shape]


class SpreadConfig(DriverConfig, frozen=True, kw_only=True):
    ports: str


class Spread(Networked):
    """Keeps each page on one of several servers, chosen by its name.

    A server that has failed is left out for a while: its pages are misses at once, and then one
    call asks it again.
    """

    promises = SPREAD
    spec = MappingProxyType(
        {
            "config": "drivers_network:SpreadConfig",
            "trial_config": {"ports": ",".join(f"{{port:{port}}}" for port in MEMBERS)},
            "trial_services": tuple(map(_server, MEMBERS)),
            "trial_members": MEMBERS,
        }
    )
    threads = 64

    def __init__(self, identity, config):
        super().__init__(identity, NetworkedConfig(port=0))
        self.members = [
            Networked(identity, NetworkedConfig(port=port)) for port in config.ports.split(",")
        ]
        for member in self.members:
            member.seconds = self.member_seconds
        self.left_out = dict[int, float]()
        self.pool = ThreadPoolExecutor(self.threads)

    # Steps that a fault replaces
    # ---------------------------------------------------------------------------------

    def member_seconds(self, call):
        return call.timeout(REQUEST_SECONDS)

    def home(self, name):
        return xxhash.xxh32_intdigest(name.encode()) % len(self.members)

    def may_ask(self, home):
        """Return whether a server is not left out; one that was is asked by one call."""
        now = time.monotonic()
        with self.lock:
            if now < self.left_out.get(home, now):
                return False
            if home in self.left_out:
                self.left_out[home] = now + REST_SECONDS
            return True

    def note(self, faults, answers):
        self.note_partial_faults(faults, served=any(answers))

    def ask(self, home, question):
        try:
            answers = question(self.members[home])
        except FAULTS:
            with self.lock:
                self.left_out[home] = time.monotonic() + REST_SECONDS
            raise
        with self.lock:
            self.left_out.pop(home, None)
        return answers

    def asked(self, call, *request):
        """What the servers answer about pages, each asked once; None where none has an answer."""
        operation, items, *rest = request
        names = [item if isinstance(item, str) else item[0] for item in items]

        def question(numbers, member):
            return member.asked(call, operation, [items[number] for number in numbers], *rest)

        answers, faults = [None] * len(names), []
        shares = defaultdict(list)
        for number, name in enumerate(names):
            shares[self.home(name)].append(number)
        jobs = {
            home: self.pool.submit(self.ask, home, partial(question, numbers))
            for home, numbers in shares.items()
            if self.may_ask(home)
        }
        for home, job in jobs.items():
            try:
                for number, answer in zip(shares[home], job.result(), strict=True):
                    answers[number] = answer
            except FAULTS as fault:
                faults.append(fault)
        self.note(faults, answers)
        return answers if operation == "get" else list(map(bool, answers))

    # The driver
    # --------------------------------------------------------------------------------------------------

    def disconnect(self):
        for member in self.members:
            member.disconnect()
        self.pool.shutdown()

    delete_objects = ObjectStorage.delete_objects
    discard_objects = ObjectStorage.discard_objects
    clear_namespaces = ObjectStorage.clear_namespaces
