"""Files of tokens as `hicache metadata token` makes them, for tokens that the tests choose."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from hicache_metadata_server.auth.files import edit_token_file, record_of

EARLIER = datetime.now(UTC) - timedelta(days=1)


def write_tokens(file, **tokens):
    """One token for each id: `id="read TOKEN"`, or `id="read TOKEN TENANT"`; with `-expired` behind
    the token it is over."""
    with edit_token_file(file) as records:
        records.clear()
        for name, text in tokens.items():
            right, token, tenant = (*text.split(), "")[:3]
            expires = EARLIER if token.endswith("-expired") else None
            records[name] = record_of(token, right, name=name, tenant=tenant, expires=expires)
    return file
