"""One id from the engine's call to the server's log, and nothing in it that could be taken for
something else."""

from __future__ import annotations

import json
import logging
import re
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_metadata_server.http.handlers import Handlers
from hicache_metadata_server.logs import configure_logs
from hicache_storage.layers import StorageOptions, wrap
from hicache_storage.observability.request_ids import (
    RequestScope,
    call_request_id,
    cleaned,
    current_request_id,
    new_request_id,
)
from hicache_storage.spec import Capabilities, HiCacheStorageExtraInfo
from tests.backends.hf3fs.harness import Rig, chain
from tests.metadata_server.http_calls import running
from tests.metadata_server.servers import SERVE
from tests.support.commands import run_python
from tests.support.failing import failing
from tests.support.forking import in_child
from tests.support.metadata import HttpClient, Served

LEGAL = re.compile(r"[A-Za-z0-9._:@/+=-]{0,64}")
SCOPE = {"scopes": [{"scope": "0:kv", "slots": 8}]}


@given(st.text(max_size=200))
def test_any_id_becomes_a_harmless_one(text):
    safe = cleaned(text)
    assert LEGAL.fullmatch(safe)
    assert len(safe) == min(len(text), 64)
    assert cleaned(safe) == safe


@given(st.from_regex(LEGAL, fullmatch=True))
def test_a_harmless_id_stays(text):
    assert cleaned(text) == text


def test_ids_of_two_processes_differ():
    ours, theirs = new_request_id(), in_child(new_request_id)
    assert theirs.split("-")[0] != ours.split("-")[0]
    assert theirs.split("-")[1] == "1"


def test_the_callers_id_comes_before_the_contexts_and_that_before_a_new_one():
    assert current_request_id() == ""
    with RequestScope("outer\n"):
        assert call_request_id(None) == "outer_"
        assert call_request_id("inner") == "inner"
    assert current_request_id() == ""
    assert call_request_id(None) != call_request_id("")


@pytest.mark.parametrize("may_hang", [False, True])
def test_a_driver_is_told_one_id_a_call(kit, may_hang):
    driver, pool = kit.memory_storage(capabilities=Capabilities(may_hang=may_hang))
    seen, looked = [], driver.objects_exist
    driver.objects_exist = lambda batches, call: (
        seen.append((call.request_id, current_request_id())) or looked(batches, call)
    )
    storage = wrap(driver, StorageOptions())
    storage.register_mem_host_pool_v2(pool, "kv")
    storage.batch_exists_v2(["a"], None, HiCacheStorageExtraInfo(request_id="chat 7"))
    with RequestScope("context"):
        storage.batch_exists_v2(["a"])
    storage.batch_exists_v2(["a"])
    storage.batch_exists_v2(["a"])
    assert seen[:2] == [("chat_7", "chat_7"), ("context", "context")]
    assert len({call for call, _ in seen}) == 4
    assert all(call == context for call, context in seen)
    storage.close()


def test_lines_of_the_sdk_have_the_fields(kit, caplog):
    driver, pool = kit.memory_storage()
    driver.before = failing(OSError("gone"), "read")
    with caplog.at_level(logging.INFO, "hicache_storage"):
        driver.batch_get_v2(
            [pool.transfer("kv", ["a"], [0])], HiCacheStorageExtraInfo(request_id="chat-7")
        )
    [record] = [record for record in caplog.records if "answering misses" in record.getMessage()]
    assert (record.levelname, record.name) == ("WARNING", "hicache_storage.objects.faults")
    assert (record.request_id, record.driver, record.operation) == ("chat-7", "memory", "read")


LOGS = """
import logging, sys
from hicache_storage.observability.logs import log_like

def give_handler(name, format):
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter(format))
    logging.getLogger(name).addHandler(handler)

give_handler("engine", "engine: %(message)s")
logging.getLogger("engine").setLevel(logging.INFO)
for name in sys.argv[1:]:
    give_handler(name, "own: %(message)s")
for _ in range(2):
    log_like(logging.getLogger("engine"))
logging.getLogger("hicache_storage.x").warning("warned")
logging.getLogger("hicache_backends.x").info("told")
logging.getLogger("hicache_backends.x").debug("not heard")
"""


@pytest.mark.parametrize(
    ("configured", "printed"),
    [
        ([], "engine: warned engine: told"),
        (["root"], "own: warned"),
        (["hicache_storage"], "own: warned engine: told"),
    ],
)
def test_logs_are_printed_as_the_engines_own_unless_somebody_has_configured_them(
    configured, printed
):
    assert run_python(LOGS, *configured).stdout.split() == printed.split()


async def test_the_server_answers_with_the_id_and_never_with_more():
    async with running() as caller:

        async def answered(path, **headers):
            return (await caller.post(path, SCOPE, headers=headers)).request_id

        for path in ("/v2/initialize", "/nothing"):
            assert await answered(path, **{"x-request-id": "chat-7"}) == "chat-7"
        odd = await answered("/v2/initialize", **{"x-request-id": '{"a": 1}' + "x" * 100})
        assert odd == "__a_:_1_" + "x" * 56
        assert len({await answered("/v2/initialize") for _ in range(3)}) == 3


def test_the_calls_id_is_that_of_its_requests_and_of_the_audit_log(tmp_path):
    """Two processes: the engine's call, and the server that it asks."""
    with Served(command=f"{SERVE} --log-format json") as place:
        rig = Rig(tmp_path / "store", metadata_url=place.url)
        with closing(rig.storage), RequestScope("chat-7"):
            rig.put(chain("c", 3))
            rig.storage.clear()
        body = HttpClient(place.url).get("/v2/history").body
        place.process.terminate()
        place.process.wait(60)
        lines = [json.loads(line) for line in place.log().splitlines()]
    of_calls = {call["route"]: call["request_id"] for call in json.loads(body)["slowest"]}
    assert of_calls["/v2/reserve"] == of_calls["/v2/commit"] == "chat-7"
    [audited] = [line for line in lines if line["logger"] == "hicache.audit"]
    assert (audited["route"], audited["request_id"]) == ("/v2/clear", "chat-7")


async def test_a_fault_of_the_server_is_logged_with_the_id(monkeypatch, capsys):
    """Also in lines that know nothing of requests."""

    def broken(handlers, request):
        logging.getLogger("elsewhere").warning("deep")
        raise RuntimeError("bug")

    monkeypatch.setattr(Handlers, "start", broken)
    configure_logs("info", "json")
    async with running() as caller:
        reply = await caller.post("/v2/initialize", SCOPE, headers={"X-Request-Id": "chat-7"})
    assert (reply.status, reply.request_id) == (500, "chat-7")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    [deep] = [line for line in lines if line["event"] == "deep"]
    [fault] = [line for line in lines if line["event"] == "request_failed"]
    assert deep["request_id"] == fault["request_id"] == "chat-7"
    assert fault["route"] == "/v2/initialize"
    assert "RuntimeError: bug" in fault["exception"]
