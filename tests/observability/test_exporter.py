"""A storage's metrics, served beside an engine's own."""

from __future__ import annotations

import logging
import socket
import threading
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from hicache_storage.observability.exporter import Exporter

HOST = "127.0.0.1"


def read(port):
    return urlopen(f"http://{HOST}:{port}/metrics", timeout=30).read().decode()


@pytest.fixture
def exporter(kit):
    storage, pool = kit.memory_storage()
    storage.batch_set_v2([pool.transfer("kv", ["a", "b"], [0, 1])])
    made = Exporter(storage, HOST, 0, {"model_name": "llama", "tp_rank": "1"})
    yield made
    made.close()


def test_prometheus_is_told_what_the_storage_counts(exporter):
    assert (
        'hicache_storage_written_pages_total{driver="memory",model_name="llama",pool="kv",tp_rank="1"} 2.0'
        in read(exporter.port)
    )


def test_nothing_is_left_of_it(exporter):
    before, port = threading.active_count(), exporter.port
    exporter.close()
    exporter.close()
    assert threading.active_count() == before - 1
    with pytest.raises(URLError, match="refused"):
        read(port)


@pytest.mark.parametrize("port", [None, 70_000])
def test_a_port_that_cannot_be_had_is_told_and_harms_nobody(port, kit, caplog):
    storage, _ = kit.memory_storage()
    with socket.socket() as taken, caplog.at_level(logging.ERROR):
        taken.bind((HOST, 0))
        taken.listen()
        Exporter(storage, HOST, port or taken.getsockname()[1], {}).close()
    assert "choose another metrics_port" in caplog.text
