"""What `deploy/` tells other programs, checked against what the server really has."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import yaml

from hicache_metadata_server.settings import ServerSettings

DEPLOY = Path(__file__).parents[2] / "deploy"
VARIABLE = re.compile(r"HICACHE_METADATA_(\w+)")


def test_only_settings_that_there_are():
    for file in DEPLOY.iterdir():
        for name in VARIABLE.findall(file.read_text()):
            assert name.lower() in ServerSettings.model_fields, f"{file.name}: {name}"


def test_the_unit():
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str
    unit.read(DEPLOY / "hicache-metadata.service")
    assert shlex.split(unit["Service"]["ExecStart"])[1:] == ["metadata", "serve"]
    if shutil.which("systemd-analyze"):
        done = subprocess.run(
            ["systemd-analyze", "verify", DEPLOY / "hicache-metadata.service"], capture_output=True, text=True, check=False
        )
        complaints = [line for line in done.stderr.splitlines() if "hicache" in line and "not executable" not in line]
        assert complaints == []


def test_the_manifest():
    service, policy, server = manifests()
    assert (service["kind"], policy["kind"], server["kind"]) == ("Service", "NetworkPolicy", "StatefulSet")
    assert server["spec"]["replicas"] == 1, "one server owns the store"
    template = server["spec"]["template"]
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    container = template["spec"]["containers"][0]
    assert container["ports"][0]["containerPort"] == service["spec"]["ports"][0]["port"] == 18000
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    given = {volume["name"] for volume in template["spec"]["volumes"]}
    claimed = {claim["metadata"]["name"] for claim in server["spec"]["volumeClaimTemplates"]}
    assert mounted == given | claimed


def manifests():
    return list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))


def test_the_unit_may_do_little():
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str
    unit.read(DEPLOY / "hicache-metadata.service")
    service = unit["Service"]
    for name, value in {
        "NoNewPrivileges": "yes", "ProtectSystem": "strict", "ProtectHome": "yes", "PrivateTmp": "yes", "PrivateDevices": "yes",
        "CapabilityBoundingSet": "", "RestrictSUIDSGID": "yes", "ProtectProc": "invisible", "UMask": "0077", "StateDirectoryMode": "0700",
    }.items():  # fmt: skip
        assert service[name] == value, name
    assert service["User"] not in ("", "root")
    assert "-HUP" in service["ExecReload"]


def test_the_pod_may_do_little():
    service, policy, server = manifests()
    spec = server["spec"]["template"]["spec"]
    pod, (container,) = spec["securityContext"], spec["containers"]
    assert (pod["runAsNonRoot"], pod["seccompProfile"]["type"]) == (True, "RuntimeDefault")
    assert pod["runAsUser"] >= 10000
    assert spec["automountServiceAccountToken"] is False
    may = container["securityContext"]
    assert (may["readOnlyRootFilesystem"], may["allowPrivilegeEscalation"], may["privileged"]) == (True, False, False)
    assert may["capabilities"] == {"drop": ["ALL"]}
    # Neither group nor others may change the tokens, or the server refuses them.
    assert spec["volumes"][0]["secret"]["defaultMode"] & 0o022 == 0
    assert policy["spec"]["podSelector"]["matchLabels"] == service["spec"]["selector"]
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert policy["spec"]["ingress"][0]["ports"] == [{"protocol": "TCP", "port": 18000}]
    assert policy["spec"]["egress"] == []


def test_the_image_runs_as_nobody_in_particular():
    lines = (DEPLOY / "Containerfile").read_text().splitlines()
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert users == ["10001:10001"]


def test_the_image_installs_what_the_server_needs():
    import tomllib

    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]
    wanted = {*project["optional-dependencies"]["server"], *project["optional-dependencies"]["cli"], *project["dependencies"]}
    wanted -= {"hicache-storage[cli]", *(one for one in wanted if one.startswith("torch"))}
    assert set(re.findall(r'"([a-z-]+[<>=][^"]*)"', (DEPLOY / "Containerfile").read_text())) == wanted
