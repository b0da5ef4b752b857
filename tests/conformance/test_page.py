"""`index.html` and the commands of a report, of a run whose names are hostile."""

from __future__ import annotations

import shlex
from html.parser import HTMLParser

from hicache_conformance.model.cause import Cause
from hicache_conformance.model.outcomes import CaseOutcome, Header, Outcome, Replay, RunRecord
from hicache_conformance.model.rules import Level
from hicache_conformance.model.verdict import judge
from hicache_conformance.report.page import page
from hicache_conformance.report.results import reproduction

HOSTILE = (
    "</title></pre></script><script>alert(1)</script><img src=x onerror='alert(2)'>\" onclick=\"x"
)
COMMAND = "x'; touch /tmp/owned; echo $(id) `id` \"'\""


def _header(text):
    return Header(
        driver=text,
        seed=1,
        profile="smoke",
        levels=["core"],
        spec_version=text,
        suite_version=text,
        distribution=text,
        capabilities={text: text},
        options={text: text},
        environment={text: text},
        contract=text,
        subject=text,
        replay=Replay(run=text, options={text: text}, services=[text]),
    )


def _outcome(text):
    cause = Cause(error=text, place=text, traceback=text, expected=False, injected=False)
    return CaseOutcome(
        case=f"test_x[{text}]",
        rules=("GET-1", "SET-1"),
        levels=("core",),
        outcome=Outcome.FAIL,
        reason=text,
        detail=f"more: {text}",
        causes=(cause,),
    )


class _Elements(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.handlers, self.texts = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.handlers += [name for name, _ in attrs if name.startswith("on")]

    def handle_data(self, data):
        self.texts.append(data)


def _shown(text):
    header, outcome = _header(text), _outcome(text)
    record = RunRecord(header, outcomes=[outcome], finished=True)
    found = _Elements()
    found.feed(page(header, judge(record, [Level.CORE], {}), {}))
    return found


def test_what_a_page_shows_is_text():
    harmless, hostile = _shown("harmless"), _shown(HOSTILE)
    assert hostile.tags == harmless.tags
    assert hostile.handlers == []
    assert any(HOSTILE in text for text in hostile.texts)


def test_a_command_is_one_command_whatever_the_names_are():
    command = reproduction(_header(COMMAND), COMMAND)
    words = shlex.split(command)
    # A name that is quoted is one word; a shell would end a command at each of these.
    assert COMMAND in words
    assert not {";", "touch", "/tmp/owned;"} & set(words)
