"""Options of drivers as texts, and the secrets in them."""

from __future__ import annotations

import pytest

from hicache_storage.hookspecs import DriverSpec
from hicache_storage.spec import Capabilities
from hicache_storage.tools.options import parse_pairs, redacted, trial_options


def test_pairs():
    assert parse_pairs(["a=1", "url=http://h?x=y", "empty="]) == {
        "a": "1",
        "url": "http://h?x=y",
        "empty": "",
    }


@pytest.mark.parametrize("text", ["path", "=x", ""])
def test_what_is_no_pair(text):
    with pytest.raises(ValueError, match="is not of the form key=value"):
        parse_pairs([text])


def test_secrets_are_hidden():
    assert redacted({"url": "redis://u:p@h:1", "password": "x", "api_key": "y", "path": "/z"}) == {
        "api_key": "***",
        "password": "***",
        "path": "/z",
        "url": "redis://***@h:1",
    }


def test_trial_options():
    def spec(**trial):
        return DriverSpec(
            name="a", target="a:A", config="a:C", capabilities=Capabilities(), trial_config=trial
        )

    assert trial_options(spec(), "/t") == {}
    assert trial_options(spec(path="{tmp}/store"), "/t") == {"path": "/t/store"}
    one, two = (trial_options(spec(prefix="a-{unique}"), "/t") for _ in range(2))
    assert one != two
    assert "{" not in str(one["prefix"])
    assert trial_options(spec(url="http://127.0.0.1:{port:meta}"), "/t") is None
