"""TLS with real handshakes: what is refused, and certificates that change while the server runs."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
import time
from contextlib import closing
from urllib.parse import urlsplit

import pytest

from hicache_backends.hf3fs.config import Hf3fsConfig
from hicache_metadata_server.auth.tls import ServerTls, first_expiry
from hicache_metadata_server.cli.admin_client import AdminClient
from hicache_metadata_server.client.errors import MetadataError
from hicache_metadata_server.client.http_client import HttpMetadataClient
from hicache_metadata_server.client.tls import client_context
from hicache_metadata_server.protocol import About
from hicache_metadata_server.settings import ServerSettings
from hicache_storage.objects import Call
from tests.metadata_server.certificates import Authority, openssl
from tests.metadata_server.servers import SERVE, Served
from tests.support.commands import run_metadata

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
    until = time.monotonic() + 30
    while shown(place, context)[0] != name:
        assert time.monotonic() < until, f"the certificate of {name} is not shown"
        time.sleep(0.05)


def test_handshakes(tmp_path, authority, others):
    trusting, refusing = client_context(ca=str(authority.file)), client_context(ca=str(others.file))
    with started(tmp_path, authority) as place:
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


def test_the_command_line_and_the_driver_speak_tls(tmp_path, authority, others):
    with started(tmp_path, authority) as place:
        trusted, other = str(authority.file), str(others.file)
        for arguments, code in (
            ((), 2),
            (("--ca", other), 2),
            (("--ca", trusted), 0),
            (("--ca", "/nonexistent"), 2),
        ):
            done = run_metadata("status", "--url", place.url, *arguments)
            assert done.exit_code == code, done.output
        assert (
            run_metadata(
                "status", "--url", place.url, env={"HICACHE_METADATA_CA": trusted}
            ).exit_code
            == 0
        )
        with closing(HttpMetadataClient(place.url, tls=client_context(ca=trusted))) as client:
            assert client.refresh(Call(10)).protocol == "2"
        for tls in (client_context(ca=other), None):
            with (
                closing(HttpMetadataClient(place.url, tls=tls)) as client,
                pytest.raises(MetadataError, match="certificate"),
            ):
                client.refresh(Call(10))


def test_clients_show_certificates(tmp_path, authority, others):
    certificate, key = authority.sign("client")
    foreign, foreign_key = others.sign("foreign")
    both = tmp_path / "both.pem"
    both.write_bytes(certificate.read_bytes() + key.read_bytes())
    with started(tmp_path, authority, f"--tls-client-ca {authority.file}") as place:
        for files, answers in (
            ({}, False),
            ({"certificate": foreign, "key": foreign_key}, False),
            ({"certificate": certificate, "key": key}, True),
            ({"certificate": both}, True),
        ):
            tls = client_context(
                ca=str(authority.file), **{name: str(file) for name, file in files.items()}
            )
            with closing(HttpMetadataClient(place.url, tls=tls)) as client:
                if answers:
                    assert client.refresh(Call(10)).protocol == "2"
                else:
                    with pytest.raises(MetadataError):
                        client.refresh(Call(10))
        with_certificate = ("--ca", str(authority.file), "--certificate", str(both))
        assert run_metadata("status", "--url", place.url, *with_certificate).exit_code == 0


def test_a_certificate_is_changed_without_a_restart(tmp_path, authority):
    trusting = client_context(ca=str(authority.file))
    with started(tmp_path, authority) as place:
        host = urlsplit(place.url)
        plain = socket.create_connection((host.hostname, host.port), timeout=10)
        with plain, trusting.wrap_socket(plain, server_hostname="localhost") as open_before:
            assert shown(place, trusting)[0] == "first"
            installed(tmp_path, *authority.sign("second"))
            until_shown(place, trusting, "second")
            assert shown(place, trusting, "127.0.0.1")[0] == "second", (
                "also for a client that names no host"
            )
            # Connections that are open go on.
            check_alive(open_before)
        # A key that does not belong to its certificate, then one that does.
        (tmp_path / "server.key").write_bytes(authority.sign("third")[1].read_bytes())
        os.kill(place.process.pid, signal.SIGHUP)
        until = time.monotonic() + 30
        while "reload_failed" not in place.log():
            assert time.monotonic() < until
            time.sleep(0.05)
        assert shown(place, trusting)[0] == "second"
        installed(tmp_path, *authority.sign("fourth"))
        until_shown(place, trusting, "fourth")


def test_authorities_of_clients_are_changed_without_a_restart(tmp_path, authority, others):
    accepted = tmp_path / "clients.pem"
    accepted.write_bytes(authority.file.read_bytes())
    contexts = {}
    for name, who in (("ours", authority), ("theirs", others)):
        certificate, key = who.sign(f"client-{name}")
        contexts[name] = client_context(
            ca=str(authority.file), certificate=str(certificate), key=str(key)
        )

    def may(name):
        try:
            shown(place, contexts[name])
        except (OSError, AssertionError):
            return False
        return True

    with started(tmp_path, authority, f"--tls-client-ca {accepted}") as place:
        assert (may("ours"), may("theirs")) == (True, False)
        (tmp_path / "new").write_bytes(others.file.read_bytes())
        (tmp_path / "new").replace(accepted)
        until = time.monotonic() + 30
        while (may("ours"), may("theirs")) != (False, True):
            assert time.monotonic() < until
            time.sleep(0.05)


def test_settings_and_options_that_cannot_be(tmp_path, authority, others):
    certificate, key = authority.sign("settings")
    with pytest.raises(ValueError, match="tls_client_ca needs tls_certificate"):
        ServerSettings(tls_client_ca=authority.file)
    with pytest.raises(ValueError, match=r"settings\.pem cannot be used"):
        ServerTls(certificate, others.sign("mismatch")[1])
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("nonsense")
    with pytest.raises(ValueError, match=r"nonsense\.pem cannot be used"):
        ServerTls(certificate, key, nonsense)
    for options, said in (
        ({"ca": str(nonsense)}, "nonsense.pem"),
        ({"ca": "/nonexistent"}, "/nonexistent"),
        ({"key": str(key)}, "needs its certificate"),
        ({"certificate": str(certificate)}, "settings.pem"),
    ):
        with pytest.raises(ValueError, match=said):
            client_context(**options)
    for options, said in (
        ({"metadata_key": "k"}, "metadata_certificate"),
        ({"metadata_ca": "c"}, "https"),
    ):
        with pytest.raises(ValueError, match=said):
            Hf3fsConfig(path="/x", metadata_url="http://x", **options)


@pytest.mark.parametrize("option", ["--tls-certificate", "--tls-key", "--tls-client-ca"])
def test_a_file_that_is_not_there_is_named_with_its_option(tmp_path, authority, option):
    certificate, key = installed(tmp_path, *authority.sign("first"))
    files = {
        "--tls-certificate": certificate,
        "--tls-key": key,
        "--tls-client-ca": authority.file,
        option: tmp_path / "nope.pem",
    }
    arguments = [str(argument) for pair in files.items() for argument in pair]
    with pytest.raises(
        ValueError, match=f"{option}: {tmp_path}/nope.pem cannot be read: No such file or directory"
    ):
        ServerTls(*files.values())
    told = run_metadata("serve", "--port", "0", "--store", f"sqlite:///{tmp_path}/m.db", *arguments)
    assert told.exit_code == 2
    assert f"{option}: {tmp_path}/nope.pem" in told.stderr
    assert len(told.stderr.strip().splitlines()) == 1


def test_the_expiry_of_certificates_is_told(tmp_path, authority):
    certificate, key = installed(tmp_path, *authority.sign("first"))
    tls = ServerTls(certificate, key, authority.file)
    assert list(tls.expiries) == [str(certificate), str(authority.file)]
    for expiry in tls.expiries.values():
        assert expiry - time.time() == pytest.approx(2 * 86_400, abs=600)
    text = openssl_end(certificate)
    assert tls.expiries[str(certificate)] == text
    chain = tmp_path / "chain.pem"
    openssl(
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "9999",
        "-subj",
        "/CN=far",
        "-keyout",
        tmp_path / "far.key",
        "-out",
        chain,
    )
    assert first_expiry(chain.read_text()) == openssl_end(chain) > 2_500_000_000, (
        "in the other form of dates, after 2049"
    )
    assert first_expiry(chain.read_text() + certificate.read_text()) == text, "the first of several"


@pytest.mark.parametrize(
    "pem", ["", "-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n"]
)
def test_what_is_no_certificate_has_no_expiry(pem):
    with pytest.raises(ValueError, match=r"."):
        first_expiry(pem)


def openssl_end(file):
    told = subprocess.run(
        ["openssl", "x509", "-enddate", "-noout", "-in", file],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return ssl.cert_time_to_seconds(told.strip().removeprefix("notAfter="))


def test_a_client_without_a_certificate_is_told_of_the_option(tmp_path, authority):
    with started(tmp_path, authority, f"--tls-client-ca {authority.file}") as place:
        told = run_metadata("status", "--url", place.url, "--ca", str(authority.file))
        assert told.exit_code == 2
        assert (
            "if the server asks for a client certificate: --certificate FILE, or "
            "HICACHE_METADATA_CERTIFICATE" in told.stderr
        )
