"""A runner of reproductions: each shows a failure of some rules.

Nothing of this project is imported here: what a script shows is shown by the driver alone.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback

_reproductions = {}


def shows(*rules):
    """Register a reproduction of a failure of these rules.

    It is called with what makes a store, and raises AssertionError where the failure is not there.
    """

    def register(function):
        for rule in rules:
            _reproductions.setdefault(rule, []).append(function)
        return function

    return register


def main(make_store, finish=lambda: None):
    """Show the failures of the rules on the command line, or all; exit with 1 if one is not there.

    Args:
        make_store: makes a rank with a host pool.
        finish: called at the end.
    """
    logging.disable(logging.ERROR)
    asked = sys.argv[1:] or list(_reproductions)
    status = 0
    for rule, function in [(name, each) for name in asked for each in _reproductions[name]]:
        try:
            function(make_store)
            print(f"{rule}: {function.__doc__}", flush=True)
        except Exception:  # noqa: BLE001 - whatever a driver raises, the failure is not there
            print(f"{rule}: not reproduced\n{traceback.format_exc()}", flush=True)
            status = 1
    finish()
    # At once: the threads of some drivers do not end.
    os._exit(status)
