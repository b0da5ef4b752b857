"""The user that docs/metadata-server.md tells operators to make in Redis, made in those of tests;
and TLS for them."""

from __future__ import annotations

import re
from pathlib import Path

from tests.metadata_server.certificates import Authority
from tests.metadata_server.redis_servers import Secured

PAGE = Path(__file__).parents[2] / "docs/metadata-server.md"
ADMIN = "admin-of-redis-9f2c51"
PASSWORD = "server-of-redis-77aa01"
LOGIN = "hicache@"


def documented_user(password=PASSWORD):
    """The line of the page, for redis.conf, without its first word."""
    [line] = re.findall(r"^user (hicache .*)$", PAGE.read_text(), re.MULTILINE)
    assert ">PASSWORD" in line
    return line.replace(">PASSWORD", f">{password}")


def permitted():
    """The commands that it may use, by their names in `INFO commandstats`."""
    return {word.removeprefix("+") for word in documented_user().split() if word.startswith("+")}


def secured(directory):
    """Files for Redis and for its clients."""
    authority = Authority(directory)
    certificate, key = authority.sign("redis")
    return Secured(authority.file, certificate, key)


def guarded(directory):
    """Settings of a Redis with TLS, a password and the documented user."""
    return {"tls": secured(directory), "password": ADMIN, "user": documented_user()}


def with_password(url, directory, password=PASSWORD):
    """An address with the password in a file."""
    file = directory / "redis.password"
    file.write_text(f"{password}\n")
    return f"{url}{'&' if '?' in url else '?'}password_file={file}"


def denied(server):
    """Operations that the user was denied."""
    with server.client() as client:
        return [(entry["username"], entry["reason"], entry["object"]) for entry in client.acl_log()]


def used(server):
    """Commands that were called since the statistics began, by whomever."""
    with server.client() as client:
        return {name.removeprefix("cmdstat_") for name in client.info("commandstats")}
