"""TLS with real handshakes: what is refused, and certificates that change while the server runs."""

from __future__ import annotations

import socket
import ssl
from contextlib import closing, suppress
from urllib.parse import urlsplit

import pytest

from hicache_backends.hf3fs.config import Hf3fsConfig
from hicache_metadata_server.auth.security import ServerTls
from hicache_metadata_server.cli.options import AdminClient
from hicache_metadata_server.client.errors import MetadataError
from hicache_metadata_server.client.http_client import HttpMetadataClient
from hicache_metadata_server.client.http_transport import client_context
from hicache_metadata_server.protocol import About
from hicache_metadata_server.settings import ServerSettings
from hicache_storage.objects import Call
from tests.metadata_server.certificates import Authority
from tests.metadata_server.servers import SERVE, Served
from tests.support.commands import run_metadata
from tests.support.waiting import eventually

pytestmark = pytest.mark.slow(seconds=25)


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("others"), "others")


def installed(directory, certificate, key):
    """Put into the place that a server reads, each in one step."""
    for file, name in ((certificate, "server.pem"), (key, "server.key")):
        (directory / "new").write_bytes(file.read_bytes())
        (directory / "new").chmod(0o600)
        (directory / "new").replace(directory / name)
    return directory / "server.pem", directory / "server.key"


def started(tmp_path, authority, options=""):
    certificate, key = installed(tmp_path, *authority.sign("first"))
    place = Served(command=f"{SERVE} --tls-certificate {certificate} --tls-key {key} {options}")
    place.url = place.url.replace("http:", "https:")
    return place


def shown(place, context, name="localhost"):
    """The name in the certificate that a server shows, over a connection of its own."""
    host = urlsplit(place.url)
    plain = socket.create_connection((host.hostname, host.port), timeout=10)
    with plain, context.wrap_socket(plain, server_hostname=name) as connection:
        check_alive(connection)
        subject = dict(pair[0] for pair in connection.getpeercert()["subject"])
        return subject["commonName"], connection.version()


def check_alive(connection):
    connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
    assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")


def until_shown(place, context, name):
    eventually(lambda: shown(place, context)[0] == name, f"{name} is not shown")


@pytest.fixture(scope="module")
def place(tmp_path_factory, authority):
    """A server whose certificate stays."""
    with started(tmp_path_factory.mktemp("server"), authority) as place:
        yield place


def test_handshakes(place, authority, others):
    trusting, refusing = client_context(ca=str(authority.file)), client_context(ca=str(others.file))
    assert shown(place, trusting)[0] == "first"
    assert shown(place, trusting, "127.0.0.1")[0] == "first"
    with pytest.raises(ssl.SSLCertVerificationError):
        shown(place, refusing)
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        shown(place, trusting, "other.example")
    old = client_context(ca=str(authority.file))
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    assert shown(place, old)[1] == "TLSv1.2"
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    old.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.raises(ssl.SSLError, match=r"EOF|alert protocol version"):
        shown(place, old)
    with pytest.raises(MetadataError, match="does not answer"):
        AdminClient(place.url.replace("https", "http")).call("/v2", None, About)


def test_the_command_line_and_the_driver_speak_tls(place, authority, others):
    trusted, other = str(authority.file), str(others.file)
    for options, environment, code in (
        ((), {}, 2),
        (("--ca", other), {}, 2),
        (("--ca", trusted), {}, 0),
        (("--ca", "/nonexistent"), {}, 2),
        ((), {"HICACHE_METADATA_CA": trusted}, 0),
    ):
        done = run_metadata("status", "--url", place.url, *options, env=environment)
        assert done.exit_code == code, done.output
    assert answers(place, client_context(ca=trusted))
    for tls in (client_context(ca=other), None):
        with pytest.raises(MetadataError, match="certificate"):
            answers(place, tls)


def answers(place, tls):
    with closing(HttpMetadataClient(place.url, tls=tls)) as client:
        return client.refresh(Call(10)).protocol == "2"


def test_clients_show_certificates_of_authorities_that_may_change(tmp_path, authority, others):
    both, accepted, ca = tmp_path / "both.pem", tmp_path / "clients.pem", str(authority.file)
    signed = authority.sign("client"), others.sign("foreign")
    ours, theirs = ({"certificate": str(file), "key": str(key)} for file, key in signed)
    both.write_bytes(b"".join(file.read_bytes() for file in signed[0]))
    accepted.write_bytes(authority.file.read_bytes())

    def allowed(**files):
        with suppress(MetadataError):
            return answers(place, client_context(ca=ca, **files))

    with started(tmp_path, authority, f"--tls-client-ca {accepted}") as place:
        assert not allowed()
        assert not allowed(**theirs)
        assert allowed(**ours)
        assert allowed(certificate=str(both))
        where = ("status", "--url", place.url, "--ca", ca)
        assert run_metadata(*where, "--certificate", both).exit_code == 0
        told = run_metadata(*where)
        option = "--certificate FILE, or HICACHE_METADATA_CERTIFICATE"
        assert told.exit_code == 2
        assert f"if the server asks for a client certificate: {option}" in told.stderr
        (tmp_path / "new").write_bytes(others.file.read_bytes())
        (tmp_path / "new").replace(accepted)
        eventually(lambda: allowed(**theirs) and not allowed(**ours))


def test_a_certificate_is_changed_without_a_restart(tmp_path, authority):
    trusting = client_context(ca=str(authority.file))
    with started(tmp_path, authority) as place:
        host = urlsplit(place.url)
        plain = socket.create_connection((host.hostname, host.port), timeout=10)
        with plain, trusting.wrap_socket(plain, server_hostname="localhost") as open_before:
            assert shown(place, trusting)[0] == "first"
            installed(tmp_path, *authority.sign("second"))
            until_shown(place, trusting, "second")
            # Also for a client that names no host.
            assert shown(place, trusting, "127.0.0.1")[0] == "second"
            # Connections that are open go on.
            check_alive(open_before)
        # A key that does not belong to its certificate, then one that does.
        (tmp_path / "server.key").write_bytes(authority.sign("third")[1].read_bytes())
        eventually(lambda: "reload_failed" in place.log())
        assert shown(place, trusting)[0] == "second"
        installed(tmp_path, *authority.sign("fourth"))
        until_shown(place, trusting, "fourth")


def test_settings_and_options_that_cannot_be(tmp_path, authority, others):
    certificate, key = authority.sign("settings")
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("nonsense")
    http = {"path": "/x", "metadata_url": "http://x"}
    for said, make, arguments in (
        ("needs tls_certificate", ServerSettings, {"tls_client_ca": authority.file}),
        (r"nonsense\.pem", client_context, {"ca": str(nonsense)}),
        ("/nonexistent", client_context, {"ca": "/nonexistent"}),
        ("needs its certificate", client_context, {"key": str(key)}),
        (r"settings\.pem", client_context, {"certificate": str(certificate)}),
        ("metadata_certificate", Hf3fsConfig, {**http, "metadata_key": "k"}),
        ("https", Hf3fsConfig, {**http, "metadata_ca": "c"}),
    ):
        with pytest.raises(ValueError, match=said):
            make(**arguments)
    missing = tmp_path / "nope.pem"
    unreadable = f"{missing} cannot be read: No such file"
    for said, files in (
        (r"settings\.pem cannot be used", (certificate, others.sign("mismatch")[1])),
        (r"nonsense\.pem cannot be used", (certificate, key, nonsense)),
        (f"--tls-certificate: {unreadable}", (missing, key)),
        (f"--tls-key: {unreadable}", (certificate, missing)),
        (f"--tls-client-ca: {unreadable}", (certificate, key, missing)),
    ):
        with pytest.raises(ValueError, match=said):
            ServerTls(*files)
