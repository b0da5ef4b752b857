"""Certificates for an afternoon, made by openssl."""

from __future__ import annotations

import subprocess


class Authority:
    """Signs certificates; everything is in one directory."""

    def __init__(self, directory, name="authority"):
        self.directory, self.file, self._key = (
            directory,
            directory / f"{name}.pem",
            directory / f"{name}.key",
        )
        openssl(
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
            "-nodes",
            "-days",
            "2",
            "-subj",
            f"/CN={name}",
            "-addext",
            "basicConstraints=critical,CA:TRUE",
            "-addext",
            "keyUsage=critical,keyCertSign",
            "-keyout",
            self._key,
            "-out",
            self.file,
        )

    def sign(self, name, hosts=("IP:127.0.0.1", "DNS:localhost")):
        """The files of a certificate and its key."""
        certificate, key = self.directory / f"{name}.pem", self.directory / f"{name}.key"
        openssl(
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
            "-nodes",
            "-days",
            "2",
            "-subj",
            f"/CN={name}",
            "-addext",
            f"subjectAltName={','.join(hosts)}",
            "-addext",
            "basicConstraints=critical,CA:FALSE",
            "-CA",
            self.file,
            "-CAkey",
            self._key,
            "-keyout",
            key,
            "-out",
            certificate,
        )
        return certificate, key


def openssl(*arguments):
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
