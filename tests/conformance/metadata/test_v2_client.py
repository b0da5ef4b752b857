"""The suite's client of the native part."""

from __future__ import annotations

import pytest

from hicache_conformance.protocol.http_client import Reply
from hicache_conformance.protocol.v2_client import V2Client
from hicache_metadata_server import protocol as p
from hicache_metadata_server.core.errors import draining, moving


class Replies:
    """Stands for an HTTP connection that gives some replies, the last of them for ever."""

    def __init__(self, content_type, *replies):
        self.content_type, self.replies, self.answer_seconds = content_type, list(replies), 0.5

    def send(self, method, path, body, **options):
        status, message = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        return Reply(path, status, self.content_type, p.encode(message, self.content_type))


def asked(content_type, *replies):
    http = Replies(content_type, *replies)
    return V2Client(http, content_type).send("/v2/touch", p.Touch(scopes=[])), len(http.replies)


@pytest.mark.parametrize("content_type", [p.JSON, p.MSGPACK])
def test_a_request_for_scopes_without_an_owner_is_sent_again(content_type):
    without_owner = (503, moving().problem)
    reply, left = asked(content_type, without_owner, without_owner, (200, p.Marked(scopes=[])))
    assert (reply.status, left) == (200, 1)


def test_a_server_that_finds_no_owner_at_all_is_found():
    assert asked(p.JSON, (503, moving().problem))[0].status == 503


def test_another_refusal_is_not_sent_again():
    reply, left = asked(p.JSON, (503, draining().problem), (200, p.Marked(scopes=[])))
    assert (reply.status, left) == (503, 1)
