"""Runs in the reader's environment: executes the blocks of a page, one after the other, in one
namespace.

Each line of standard input is a JSON object with `name`, `line` and `code`; the answer is a JSON
text on descriptor 3: empty, or the traceback. What blocks print goes where standard output goes.
"""

import ast
import json
import os
import sys
import traceback

_answers = os.fdopen(3, "w", buffering=1)

for _request in sys.stdin:
    _block = json.loads(_request)
    try:
        _tree = ast.increment_lineno(ast.parse(_block["code"]), _block["line"] - 1)
        exec(compile(_tree, _block["name"], "exec", dont_inherit=True), globals())  # noqa: S102 - the page says so
        _said = ""
    except BaseException:  # noqa: BLE001 - whatever a page raises is for its reader
        _said = traceback.format_exc()
    sys.stdout.flush()
    print(json.dumps(_said), file=_answers)
