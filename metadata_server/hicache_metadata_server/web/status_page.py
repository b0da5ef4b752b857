"""A page for people: what is there, and how full."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from hicache_metadata_server.service.service import MetadataService

_STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; color: #222; background: #fff }
table { border-collapse: collapse; width: 100% } th, td { padding: .3rem .8rem .3rem 0; text-align: right; border-bottom: 1px solid #ddd }
th:first-child, td:first-child { text-align: left; word-break: break-all } .bar { width: 12rem; background: #eee; display: flex; height: .8rem }
.live { background: #2a7 } .leased { background: #28c } .quarantined { background: #d92 } .note { color: #a30 }
@media (prefers-color-scheme: dark) { body { color: #ddd; background: #181818 } th, td { border-color: #333 } .bar { background: #333 } }
"""


def status_page(service: MetadataService, problem: str) -> str:
    """The page; `problem` is what keeps the server from being ready."""
    about = service.about
    note = f'<p class="note">{escape(problem)}</p>' if problem else ""
    rows = "".join(_row(status) for status in service.list_scopes().scopes) or '<tr><td colspan="7">no scope yet</td></tr>'
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>HiCache metadata</title>
<style>{_STYLE}</style></head><body>
<h1>HiCache metadata server</h1>
<p>{escape(about.server)}, protocol {escape(about.protocol)}, instance {escape(about.instance)}, durability {about.durability}.
<a href="/docs">API</a>, <a href="/metrics">metrics</a></p>{note}
<table><tr><th>scope</th><th>slots</th><th>live</th><th>leased</th><th>quarantined</th><th>free</th><th></th></tr>{rows}</table>
</body></html>"""


def _row(status: object) -> str:
    numbers = {name: int(getattr(status, name)) for name in ("slots", "live", "leased", "quarantined", "free")}
    cells = "".join(f"<td>{number:,}</td>" for number in numbers.values())
    shares = {name: 100 * numbers[name] / numbers["slots"] for name in ("live", "leased", "quarantined")}
    bar = "".join(f'<span class="{name}" style="width:{share:.2f}%"></span>' for name, share in shares.items())
    return f'<tr><td>{escape(str(getattr(status, "scope", "")))}</td>{cells}<td><div class="bar">{bar}</div></td></tr>'
