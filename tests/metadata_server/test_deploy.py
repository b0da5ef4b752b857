"""What `deploy/` tells other programs: against what the server really has, and against what those
programs read."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import sys
import tomllib
from datetime import datetime
from pathlib import Path

import pytest
import yaml

from hicache_metadata_server.settings import ServerSettings
from hicache_metadata_server.shared.address import PasswordFile, parse_address
from tests.metadata_server.servers import SERVE, served
from tests.support.commands import run_program

DEPLOY = Path(__file__).parents[2] / "deploy"
VARIABLE = re.compile(r"HICACHE_METADATA_(\w+)")
UNIT = DEPLOY / "hicache-metadata.service"
BACKUP_UNIT = DEPLOY / "hicache-metadata-backup.service"
MANIFESTS = ("kubernetes.yaml", "kubernetes-redis.yaml")


def manifests(name="kubernetes.yaml"):
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def test_only_settings_that_there_are():
    for file in DEPLOY.iterdir():
        for name in VARIABLE.findall(file.read_text()):
            assert name.lower() in ServerSettings.model_fields, f"{file.name}: {name}"


@pytest.mark.parametrize(
    "unit", [UNIT, BACKUP_UNIT, BACKUP_UNIT.with_suffix(".timer")], ids=lambda unit: unit.name
)
def test_systemd_takes_the_units(unit):
    """Its own verifier; that nothing is installed in /opt here is no complaint."""
    told = run_program("systemd-analyze", "verify", unit).stderr.splitlines()
    assert [line for line in told if "hicache" in line and "not executable" not in line] == []


def test_the_unit_serves_and_is_as_tight_as_the_page_says():
    """Its exposure by systemd's own reckoning, times ten."""
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str
    unit.read(UNIT)
    assert shlex.split(unit["Service"]["ExecStart"])[1:] == ["metadata", "serve"]
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", UNIT]
    assert run_program(*command, "--threshold=15").returncode == 0
    assert run_program(*command, "--threshold=13").returncode != 0


@pytest.mark.parametrize("version", ["1.27", "1.31", "1.35"])
@pytest.mark.parametrize("name", [*MANIFESTS, "kubernetes-servicemonitor.yaml"])
def test_manifests_are_what_kubernetes_takes(name, version):
    # Importing it takes two seconds, and every worker imports this file.
    import kubernetes_validate

    for part in manifests(name):
        # A ServiceMonitor is of the Prometheus operator, not of Kubernetes.
        if part["kind"] != "ServiceMonitor":
            kubernetes_validate.validate(part, version, strict=True)


@pytest.mark.parametrize("name", MANIFESTS)
def test_parts_of_a_manifest_belong_together_and_may_do_little(name):
    service, policy, *budgets, server = manifests(name)
    spec = server["spec"]["template"]["spec"]
    [container] = spec["containers"]
    labels = server["spec"]["template"]["metadata"]["labels"]
    for selector in (
        service["spec"]["selector"],
        policy["spec"]["podSelector"]["matchLabels"],
        *(part["spec"]["selector"]["matchLabels"] for part in (*budgets, server)),
    ):
        assert selector.items() <= labels.items()
    assert container["ports"][0]["containerPort"] == service["spec"]["ports"][0]["port"] == 18000
    claims = server["spec"].get("volumeClaimTemplates", [])
    volumes = {volume["name"] for volume in spec["volumes"]}
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == volumes | {claim["metadata"]["name"] for claim in claims}
    # Several servers need a Redis; one alone owns its store.
    assert (server["spec"]["replicas"] == 1) == bool(claims)
    assert all(part["spec"]["minAvailable"] < server["spec"]["replicas"] for part in budgets)
    pod, may = spec["securityContext"], container["securityContext"]
    assert (pod["runAsNonRoot"], pod["seccompProfile"]["type"]) == (True, "RuntimeDefault")
    assert pod["runAsUser"] >= 10000
    assert spec["automountServiceAccountToken"] is False
    assert (may["readOnlyRootFilesystem"], may["privileged"]) == (True, False)
    assert may["allowPrivilegeEscalation"] is False
    assert may["capabilities"] == {"drop": ["ALL"]}
    # Neither group nor others may change the tokens, or the server refuses them.
    modes = [volume["secret"]["defaultMode"] for volume in spec["volumes"] if "secret" in volume]
    assert modes
    assert all(mode & 0o022 == 0 for mode in modes)
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert policy["spec"]["ingress"][0]["ports"] == [{"protocol": "TCP", "port": 18000}]
    assert all(rule["to"] and rule["ports"] for rule in policy["spec"]["egress"])
    assert bool(policy["spec"]["egress"]) != bool(claims), "a server with a disk asks nobody"


def test_several_servers_start_with_their_settings_and_reach_their_redis(monkeypatch):
    _, policy, _, servers = manifests("kubernetes-redis.yaml")
    [container] = servers["spec"]["template"]["spec"]["containers"]
    settings = ServerSettings(
        **{
            VARIABLE.fullmatch(variable["name"])[1].lower(): variable["value"]
            for variable in container["env"]
            if "value" in variable
        }
    )
    # Its files lie in what is mounted, and it may go where Redis and its name are.
    mounts = tuple(f"{mount['mountPath']}/" for mount in container["volumeMounts"])
    monkeypatch.setattr(Path, "is_file", lambda path: str(path).startswith(mounts))
    store = parse_address(settings.store)
    assert store.options["ssl"]
    assert isinstance(store.options["credential_provider"], PasswordFile)
    ports = {
        (one["protocol"], one["port"]) for rule in policy["spec"]["egress"] for one in rule["ports"]
    }
    assert ports >= {("TCP", store.hosts[0][1]), ("UDP", 53), ("TCP", 53)}


@pytest.mark.parametrize("name", MANIFESTS)
def test_metrics_are_collected_with_a_token(name):
    """No annotation of a pod can send one, and without one /metrics answers 401."""
    assert "prometheus.io" not in (DEPLOY / name).read_text()
    service = manifests(name)[0]
    monitor, policy = manifests("kubernetes-servicemonitor.yaml")
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    selector = monitor["spec"]["selector"]["matchLabels"]
    assert selector.items() <= service["metadata"]["labels"].items()
    [endpoint] = monitor["spec"]["endpoints"]
    assert endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]
    assert (endpoint["path"], endpoint["authorization"]["type"]) == ("/metrics", "Bearer")
    secret = endpoint["authorization"]["credentials"]
    text = (DEPLOY / "kubernetes-servicemonitor.yaml").read_text()
    assert f"secret generic {secret['name']} --from-file={secret['key']}=" in text
    assert policy["spec"]["podSelector"]["matchLabels"] == service["spec"]["selector"]


@pytest.mark.long
def test_scheduled_backups_are_made(tmp_path):
    """The command as it stands there, with the paths of this test."""
    [line] = re.findall("^ExecStart=(.*)$", BACKUP_UNIT.read_text(), re.MULTILINE)
    command = shlex.split(line.replace("$$", "$").replace("%%", "%"))
    main = f"{sys.executable} -c 'from hicache_storage.cli.main import main; main()'"
    command[-1] = command[-1].replace("/var/lib/hicache-metadata", str(tmp_path))
    command[-1] = command[-1].replace("/opt/hicache/bin/hicache", main)
    (tmp_path / "backups").mkdir()
    with served(f"{SERVE} --store sqlite:///{tmp_path}/metadata.db") as (_, client):
        client.post("/0/initialize", {"num_pages": 50})
        # The second week takes the place of the first.
        for _ in range(2):
            done = run_program(*command, STATE_DIRECTORY=str(tmp_path / "backups"))
            assert done.returncode == 0, done.stderr
    day = datetime.now().astimezone().isoweekday()
    assert [file.stem for file in (tmp_path / "backups").iterdir()] == [f"metadata-{day}"]


def test_the_image_installs_what_the_server_needs_and_runs_as_nobody_in_particular():
    text = (DEPLOY / "Containerfile").read_text()
    assert re.findall("^USER (.*)$", text, re.MULTILINE) == ["10001:10001"]
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = {*extras["server"], *extras["redis"], *extras["cli"], *project["dependencies"]}
    # The server needs neither torch nor what torch asks for.
    own = ("numpy", "torch", "hicache-storage[")
    wanted = {one for one in needed if not one.startswith(own)}
    assert set(re.findall(r'"([a-z-]+[<>=][^"]*)"', text)) == wanted


def test_hadolint_finds_nothing_in_the_image():
    hadolint = Path(sys.executable).parent / "hadolint"
    done = run_program(hadolint, "--no-color", DEPLOY / "Containerfile")
    assert (done.returncode, done.stdout) == (0, "")


def test_grafana_knows_every_field_of_the_dashboard():
    """Read into Grafana's own models of 11.6 and written again, nothing is missing: what they do
    not know they leave out."""
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    raw = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    again = json.loads(JSONEncoder().encode(Dashboard.from_json(raw)))
    # Of a query variable: Grafana itself writes it, and its models lack it.
    assert set(fields(raw)) - set(fields(again)) == {".templating.list.definition"}


def fields(one, path=""):
    """Names of fields with those around them."""
    parts = one.items() if isinstance(one, dict) else [("", part) for part in one]
    for name, value in parts:
        inner = f"{path}.{name}" if name else path
        yield inner
        if isinstance(value, (dict, list)):
            yield from fields(value, inner)
