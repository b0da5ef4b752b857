"""What `deploy/` tells other programs: against what the server really has, and against what those
programs read."""

from __future__ import annotations

import configparser
import copy
import json
import re
import shlex
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models import prometheus, timeseries
from grafana_foundation_sdk.models.dashboard import Dashboard, Panel

from hicache_metadata_server.settings import ServerSettings
from hicache_metadata_server.storage.address import parse_address
from tests.metadata_server.servers import SERVE, served
from tests.support.commands import run_program

DEPLOY = Path(__file__).parents[2] / "deploy"
VARIABLE = re.compile(r"HICACHE_METADATA_(\w+)")
UNIT = DEPLOY / "hicache-metadata.service"
MANIFESTS = ("kubernetes.yaml", "kubernetes-redis.yaml")
KUBERNETES = ("1.27", "1.31", "1.35")


def test_only_settings_that_there_are():
    for file in DEPLOY.iterdir():
        for name in VARIABLE.findall(file.read_text()):
            assert name.lower() in ServerSettings.model_fields, f"{file.name}: {name}"


def test_the_unit():
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str
    unit.read(DEPLOY / "hicache-metadata.service")
    assert shlex.split(unit["Service"]["ExecStart"])[1:] == ["metadata", "serve"]
    assert complaints_about(UNIT) == []


def complaints_about(unit):
    """Of systemd's own verifier, but that nothing is installed in /opt here."""
    done = run_program("systemd-analyze", "verify", unit)
    return [
        line
        for line in done.stderr.splitlines()
        if "hicache" in line and "not executable" not in line
    ]


def test_a_unit_that_is_wrong_is_complained_about(tmp_path):
    wrong = tmp_path / "hicache-metadata.service"
    wrong.write_text(UNIT.read_text().replace("ProtectProc=invisible", "ProtectProc=invisibly"))
    assert any("invisibly" in line for line in complaints_about(wrong))


def test_the_unit_is_as_tight_as_the_page_says():
    """Its exposure by systemd's own reckoning, times ten."""
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", UNIT]
    assert run_program(*command, "--threshold=15").returncode == 0
    assert run_program(*command, "--threshold=13").returncode != 0


def test_the_manifest():
    service, policy, server = manifests()
    assert (service["kind"], policy["kind"], server["kind"]) == (
        "Service",
        "NetworkPolicy",
        "StatefulSet",
    )
    assert server["spec"]["replicas"] == 1, "one server owns the store"
    template = server["spec"]["template"]
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    container = template["spec"]["containers"][0]
    assert container["ports"][0]["containerPort"] == service["spec"]["ports"][0]["port"] == 18000
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    given = {volume["name"] for volume in template["spec"]["volumes"]}
    claimed = {claim["metadata"]["name"] for claim in server["spec"]["volumeClaimTemplates"]}
    assert mounted == given | claimed


def manifests(name="kubernetes.yaml"):
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("name", [*MANIFESTS, "kubernetes-servicemonitor.yaml"])
def test_manifests_are_what_kubernetes_takes(name, version):
    for part in manifests(name):
        if part["kind"] == "ServiceMonitor":
            # Of the Prometheus operator, not of Kubernetes.
            continue
        kubernetes_validate.validate(part, version, strict=True)
        unlike = copy.deepcopy(part)
        unlike["spec"]["unheardOf"] = 1
        with pytest.raises(kubernetes_validate.ValidationError, match="unheardOf"):
            kubernetes_validate.validate(unlike, version, strict=True)


def test_the_manifest_of_several_servers(monkeypatch):
    service, policy, budget, servers = manifests("kubernetes-redis.yaml")
    assert (budget["kind"], servers["kind"]) == ("PodDisruptionBudget", "Deployment")
    spec = servers["spec"]["template"]["spec"]
    [container] = spec["containers"]
    labels = servers["spec"]["template"]["metadata"]["labels"]
    for selector in (
        service["spec"]["selector"],
        *(part["spec"]["selector"]["matchLabels"] for part in (budget, servers)),
    ):
        assert selector.items() <= labels.items()
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    assert budget["spec"]["minAvailable"] < servers["spec"]["replicas"]
    given = {
        variable["name"]: variable["value"] for variable in container["env"] if "value" in variable
    }
    settings = ServerSettings(
        **{VARIABLE.fullmatch(name)[1].lower(): value for name, value in given.items()}
    )
    # Its files lie in what is mounted, and it may go where Redis and its name are.
    monkeypatch.setattr(
        Path, "is_file", lambda path: str(path).startswith(tuple(mounts(container)))
    )
    store = parse_address(settings.store)
    assert store.tls is not None
    assert store.login.password_file
    ports = [
        (one["protocol"], one["port"]) for rule in policy["spec"]["egress"] for one in rule["ports"]
    ]
    assert ("TCP", store.hosts[0][1]) in ports
    assert {("UDP", 53), ("TCP", 53)} <= set(ports)
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in spec["volumes"]
    }


def mounts(container):
    return [f"{mount['mountPath']}/" for mount in container["volumeMounts"]]


def test_metrics_are_collected_with_a_token():
    """No annotation of a pod can send one, and without one /metrics answers 401."""
    for name in MANIFESTS:
        assert "prometheus.io" not in (DEPLOY / name).read_text()
        service = manifests(name)[0]
        monitor, policy = manifests("kubernetes-servicemonitor.yaml")
        assert (monitor["apiVersion"], monitor["kind"]) == (
            "monitoring.coreos.com/v1",
            "ServiceMonitor",
        )
        assert (
            monitor["spec"]["selector"]["matchLabels"].items()
            <= service["metadata"]["labels"].items()
        )
        [endpoint] = monitor["spec"]["endpoints"]
        assert endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]
        assert endpoint["path"] == "/metrics"
        assert endpoint["authorization"]["type"] == "Bearer"
        secret = endpoint["authorization"]["credentials"]
        text = (DEPLOY / "kubernetes-servicemonitor.yaml").read_text()
        assert f"secret generic {secret['name']} --from-file={secret['key']}=" in text
        assert policy["spec"]["podSelector"]["matchLabels"] == service["spec"]["selector"]


@pytest.mark.long
def test_scheduled_backups_are_made(tmp_path):
    """The command as it stands there, with the paths of this test."""
    unit = DEPLOY / "hicache-metadata-backup.service"
    assert (
        complaints_about(unit) == complaints_about(DEPLOY / "hicache-metadata-backup.timer") == []
    )
    [line] = re.findall("^ExecStart=(.*)$", unit.read_text(), re.MULTILINE)
    command = shlex.split(line.replace("$$", "$").replace("%%", "%"))
    main = f"{sys.executable} -c 'from hicache_storage.cli.main import main; main()'"
    for there, here in {
        "/var/lib/hicache-metadata": str(tmp_path),
        "/opt/hicache/bin/hicache": main,
    }.items():
        command[-1] = command[-1].replace(there, here)
    (tmp_path / "backups").mkdir()
    with served(f"{SERVE} --store sqlite:///{tmp_path}/metadata.db") as (_, client):
        client.http.post("/0/initialize", {"num_pages": 50})
        # The second week takes the place of the first.
        for _ in range(2):
            done = run_program(*command, STATE_DIRECTORY=str(tmp_path / "backups"))
            assert done.returncode == 0, done.stderr
    assert [file.stem for file in (tmp_path / "backups").iterdir()] == [
        f"metadata-{datetime.now().astimezone().isoweekday()}"
    ]


def test_the_unit_may_do_little():
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str
    unit.read(DEPLOY / "hicache-metadata.service")
    service = unit["Service"]
    for name, value in {
        "NoNewPrivileges": "yes",
        "ProtectSystem": "strict",
        "ProtectHome": "yes",
        "PrivateTmp": "yes",
        "PrivateDevices": "yes",
        "CapabilityBoundingSet": "",
        "RestrictSUIDSGID": "yes",
        "ProtectProc": "invisible",
        "UMask": "0077",
        "StateDirectoryMode": "0700",
    }.items():
        assert service[name] == value, name
    assert service["User"] not in ("", "root")
    assert "-HUP" in service["ExecReload"]


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_pod_may_do_little(name):
    service, policy, *_, server = manifests(name)
    spec = server["spec"]["template"]["spec"]
    pod, (container,) = spec["securityContext"], spec["containers"]
    assert (pod["runAsNonRoot"], pod["seccompProfile"]["type"]) == (True, "RuntimeDefault")
    assert pod["runAsUser"] >= 10000
    assert spec["automountServiceAccountToken"] is False
    may = container["securityContext"]
    assert (may["readOnlyRootFilesystem"], may["allowPrivilegeEscalation"], may["privileged"]) == (
        True,
        False,
        False,
    )
    assert may["capabilities"] == {"drop": ["ALL"]}
    # Neither group nor others may change the tokens, or the server refuses them.
    modes = [volume["secret"]["defaultMode"] for volume in spec["volumes"] if "secret" in volume]
    assert modes
    assert all(mode & 0o022 == 0 for mode in modes)
    assert policy["spec"]["podSelector"]["matchLabels"] == service["spec"]["selector"]
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert policy["spec"]["ingress"][0]["ports"] == [{"protocol": "TCP", "port": 18000}]
    assert all(rule["to"] and rule["ports"] for rule in policy["spec"]["egress"])


def test_one_server_with_a_disk_asks_nobody():
    assert manifests()[1]["spec"]["egress"] == []


def test_the_image_runs_as_nobody_in_particular():
    lines = (DEPLOY / "Containerfile").read_text().splitlines()
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert users == ["10001:10001"]


def test_the_image_installs_what_the_server_needs():
    import tomllib

    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = {*extras["server"], *extras["redis"], *extras["cli"], *project["dependencies"]}
    wanted -= {
        "hicache-storage[cli]",
        "hicache-storage[server]",
        # The server needs neither torch nor what torch asks for.
        *(one for one in wanted if one.startswith(("numpy", "torch"))),
    }
    assert (
        set(re.findall(r'"([a-z-]+[<>=][^"]*)"', (DEPLOY / "Containerfile").read_text())) == wanted
    )


def test_hadolint_finds_nothing_in_the_image():
    hadolint = Path(sys.executable).parent / "hadolint"
    done = run_program(hadolint, "--no-color", DEPLOY / "Containerfile")
    assert (done.returncode, done.stdout) == (0, "")
    spoiled = (DEPLOY / "Containerfile").read_text().replace("python:3.12-slim", "python:latest")
    done = subprocess.run(
        [hadolint, "--no-color", "-"], input=spoiled, capture_output=True, text=True, check=False
    )
    assert "DL3007" in done.stdout


def lost(before, after, path=""):
    """What stands in the one and not in the other."""
    if isinstance(before, dict) and isinstance(after, dict):
        return [
            one
            for name in before
            for one in (
                lost(before[name], after[name], f"{path}.{name}")
                if name in after
                else [f"{path}.{name}"]
            )
        ]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        return [one for some in zip(before, after, strict=True) for one in lost(*some, f"{path}[]")]
    return [] if before == after else [f"{path}: {before} {after}"]


def test_grafana_knows_every_field_of_the_dashboard():
    """Read into Grafana's own models of 11.6 and written again, nothing is missing: what they do
    not know they leave out."""
    register_default_plugins()
    raw = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    read = Dashboard.from_json(raw)
    # Of a query variable: Grafana itself writes it, and its models lack it.
    assert lost(raw, json.loads(JSONEncoder().encode(read))) == [".templating.list[].definition"]
    panels = [panel for panel in read.panels if isinstance(panel, Panel)]
    assert len(panels) > 50
    assert all(isinstance(panel.options, timeseries.Options) for panel in panels)
    assert all(
        isinstance(target, prometheus.Dataquery) for panel in panels for target in panel.targets
    )
    raw["panels"][1]["fieldConfigs"] = {}
    assert ".panels[].fieldConfigs" in lost(
        raw, json.loads(JSONEncoder().encode(Dashboard.from_json(raw)))
    )
