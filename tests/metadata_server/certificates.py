"""Certificates for an afternoon, made by openssl."""

from __future__ import annotations

import subprocess


class Authority:
    """Signs certificates; everything is in one directory."""

    def __init__(self, directory, name="authority"):
        self.directory = directory
        self.file, self._key = self._files(name)
        extensions = ("basicConstraints=critical,CA:TRUE", "keyUsage=critical,keyCertSign")
        _make_certificate(name, self.file, self._key, *extensions)

    def sign(self, name, hosts=("IP:127.0.0.1", "DNS:localhost")):
        """The files of a certificate and its key."""
        files, signed_by = self._files(name), ("-CA", self.file, "-CAkey", self._key)
        extensions = (f"subjectAltName={','.join(hosts)}", "basicConstraints=critical,CA:FALSE")
        _make_certificate(name, *files, *extensions, signed_by=signed_by)
        return files

    def _files(self, name):
        return self.directory / f"{name}.pem", self.directory / f"{name}.key"


def _make_certificate(name, certificate, key, *extensions, signed_by=()):
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")
    added = [word for extension in extensions for word in ("-addext", extension)]
    files = ("-keyout", key, "-out", certificate)
    openssl("req", "-x509", *curve, "-subj", f"/CN={name}", *added, *signed_by, *files)


def openssl(*arguments):
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
