"""`hicache metrics`: what is exported, and what Grafana and Prometheus make of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hicache_storage.observability.metric_defs import COMPONENTS, metrics_of
from hicache_storage.tools.metrics import dashboard, rules, with_generated_parts

metrics = typer.Typer(
    help="Every metric of drivers and servers; a dashboard and alert rules made of them.",
    no_args_is_help=True,
)

Output = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write to this file instead of standard output.")
]


@metrics.command("list")
def list_metrics() -> None:
    """List every metric with its kind, its labels and what it counts, one a line."""
    for component in COMPONENTS:
        for metric in metrics_of(component).values():
            typer.echo(
                f"{metric.name:<50} {metric.kind:<10} {','.join(metric.labels):<22} {metric.help}"
            )


@metrics.command("dashboard")
def show_dashboard(output: Output = None) -> None:
    """The dashboard for Grafana, as JSON to import."""
    _tell(dashboard(), output)


@metrics.command("alerts")
def show_alerts(
    output: Output = None,
    page: Annotated[
        str,
        typer.Option(
            "--runbook",
            metavar="URL",
            help="Where you publish the page `observability`: each alert links to its section.",
        ),
    ] = "",
) -> None:
    """The alert rules for Prometheus, as YAML for `rule_files`."""
    _tell(rules(page), output)


@metrics.command("write", hidden=True)
def write(root: Annotated[Path, typer.Argument(help="The repository.")]) -> None:
    """Make the files in the repository anew that are made of the metrics."""
    (root / "deploy" / "grafana-dashboard.json").write_text(dashboard(), "utf-8")
    (root / "deploy" / "prometheus-alerts.yaml").write_text(rules(), "utf-8")
    page = root / "docs" / "observability.md"
    page.write_text(with_generated_parts(page.read_text("utf-8")), "utf-8")


def _tell(text: str, output: Path | None) -> None:
    if output is None:
        # The text ends with a line feed, so that output and file are the same.
        typer.echo(text, nl=False)
    else:
        output.write_text(text, "utf-8")
