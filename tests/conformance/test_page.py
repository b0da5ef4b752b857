"""`index.html` and the commands of a report, of a run whose names are hostile."""

from __future__ import annotations

import re
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


def _judged(header, *outcomes):
    record = RunRecord(header, outcomes=list(outcomes), finished=True)
    return judge(record, [Level.CORE], {})


def _shown(text):
    header = _header(text)
    found = _Elements()
    found.feed(page(header, _judged(header, _outcome(text)), {}))
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


def test_options_of_a_foreign_driver_are_quoted():
    header = _header(COMMAND)
    header.options = {"given": COMMAND, "of its name": COMMAND}
    given = {"given": COMMAND}
    header.replay = Replay(run=COMMAND, options=given, interface=COMMAND)
    words = shlex.split(reproduction(header, COMMAND))
    assert words[:7] == [
        *("hicache", "conformance", "run", COMMAND),
        *("--interface", COMMAND, "-c"),
    ]
    assert f"given={COMMAND}" in words
    assert f"of its name={COMMAND}" not in words


def test_the_page_tells_of_the_rules_that_the_table_has_as_broken():
    header = _header("driver")
    header.not_promised = {"FT-1": "nobody promises it"}

    def ended(name, outcome, *rules, broken=""):
        return CaseOutcome(
            case=name, rules=rules, levels=("core",), outcome=outcome, broken_rule=broken
        )

    judgement = _judged(
        header,
        ended("test_a_rule_of_another_case", Outcome.FAIL, "GET-1", broken="SET-1"),
        ended("test_several_rules", Outcome.FAIL, "GET-2", "GET-3"),
        ended("test_both", Outcome.ERROR, "GET-3", "GET-4"),
        ended("test_what_is_not_promised", Outcome.FAIL, "EX-9", broken="FT-1"),
    )
    text = page(header, judgement, {})
    shown = re.findall(r'class="failure (\w+)" id="failed-([A-Z]+-\d+)"', text)
    broken = [
        (str(result.outcome), result.rule.id)
        for result in judgement.rules
        if result.outcome in (Outcome.FAIL, Outcome.ERROR)
    ]
    assert shown == broken
    assert {rule for _, rule in shown} == {"SET-1", "GET-2", "GET-3", "GET-4"}
