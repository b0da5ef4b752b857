"""Why matrix.md has no run of `sglang-kvblockd`: `python kvblockd_constructor.py`"""

import traceback

from engine import config
from shows import main, shows


def make_store(_pool, **changes):
    """A rank, as SGLang makes it; nothing connects before the first call."""
    from sglang_kvblockd import KvblockdHiCacheStorage

    return KvblockdHiCacheStorage(config({"interface_v1": 1}, **changes), {})


@shows("LC-1")
def it_cannot_be_constructed(make):
    """The constructor raises TypeError, because SGLang tells it that `tp_lcm_size` is None."""
    try:
        make(None)
    except TypeError as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        assert (last.filename.rpartition("/")[2], last.lineno) == ("keymap.py", 86), last
        assert "tp_lcm_size" in last.line
    else:
        raise AssertionError("it can be constructed")


if __name__ == "__main__":
    main(make_store)
