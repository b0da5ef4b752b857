"""`index.html` and the commands of a report, of a run whose names are hostile."""

from __future__ import annotations

import re
import shlex
from html.parser import HTMLParser

from hicache_conformance.model.cause import Cause
from hicache_conformance.model.outcomes import Outcome, Replay
from hicache_conformance.report.files import page
from hicache_conformance.report.results import reproduction
from tests.conformance.records import ended, header, judged

HOSTILE = (
    "</title></pre></script><script>alert(1)</script><img src=x onerror='alert(2)'>\" onclick=\"x"
)
COMMAND = "x'; touch /tmp/owned; echo $(id) `id` \"'\""


def _header(text):
    names = dict.fromkeys(("driver", "spec_version", "suite_version", "distribution"), text)
    maps = {name: {text: text} for name in ("capabilities", "options", "environment")}
    replay = Replay(run=text, options={text: text}, services=[text])
    return header(**names, **maps, replay=replay)


def _outcome(text):
    cause = Cause(error=text, place=text, traceback=text, expected=False, injected=False)
    said = {"reason": text, "detail": f"more: {text}", "causes": (cause,)}
    return ended(f"test_x[{text}]", "GET-1", "SET-1", outcome=Outcome.FAIL, **said)


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
    run, found = _header(text), _Elements()
    found.feed(page(run, judged(_outcome(text), run=run), {}))
    return found


def test_what_a_page_shows_is_text():
    harmless, hostile = _shown("harmless"), _shown(HOSTILE)
    assert hostile.tags == harmless.tags
    assert hostile.handlers == []
    assert any(HOSTILE in text for text in hostile.texts)


def test_a_command_is_one_command_whatever_the_names_are():
    run = _header(COMMAND)
    run.options = {"given": COMMAND, "of its name": COMMAND}
    run.replay = Replay(run=COMMAND, options={"given": COMMAND}, interface=COMMAND)
    run.page_bytes = 8192
    words = shlex.split(reproduction(run, COMMAND))
    assert words[:7] == [
        *("hicache", "conformance", "run", COMMAND),
        *("--interface", COMMAND, "-c"),
    ]
    assert f"given={COMMAND}" in words
    assert f"of its name={COMMAND}" not in words
    assert words[words.index("--page-bytes") + 1] == "8192"
    # A name that is quoted is one word; a shell would end a command at each of these.
    assert not {";", "touch", "/tmp/owned;"} & set(words)


def test_the_page_tells_of_the_rules_that_the_table_has_as_broken():
    run = header(not_promised={"FT-1": "nobody promises it"})
    judgement = judged(
        ended("test_of_another", "GET-1", outcome=Outcome.FAIL, broken_rule="SET-1"),
        ended("test_several_rules", "GET-2", "GET-3", outcome=Outcome.FAIL),
        ended("test_both", "GET-3", "GET-4", outcome=Outcome.ERROR),
        ended("test_not_promised", "EX-9", outcome=Outcome.FAIL, broken_rule="FT-1"),
        run=run,
    )
    text = page(run, judgement, {})
    shown = re.findall(r'class="failure (\w+)" id="failed-([A-Z]+-\d+)"', text)
    broken = [
        (str(result.outcome), result.rule.id)
        for result in judgement.rules
        if result.outcome in (Outcome.FAIL, Outcome.ERROR)
    ]
    assert shown == broken
    assert {rule for _, rule in shown} == {"SET-1", "GET-2", "GET-3", "GET-4"}
