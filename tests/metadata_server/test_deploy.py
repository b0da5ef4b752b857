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
    service, server = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    assert (service["kind"], server["kind"]) == ("Service", "StatefulSet")
    assert server["spec"]["replicas"] == 1, "one server owns the store"
    template = server["spec"]["template"]
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    container = template["spec"]["containers"][0]
    assert container["ports"][0]["containerPort"] == service["spec"]["ports"][0]["port"] == 18000
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    given = {volume["name"] for volume in template["spec"]["volumes"]}
    claimed = {claim["metadata"]["name"] for claim in server["spec"]["volumeClaimTemplates"]}
    assert mounted == given | claimed


def test_the_image_installs_what_the_server_needs():
    import tomllib

    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]
    wanted = {*project["optional-dependencies"]["server"], *project["optional-dependencies"]["cli"], *project["dependencies"]}
    wanted -= {"hicache-storage[cli]", *(one for one in wanted if one.startswith("torch"))}
    assert set(re.findall(r'"([a-z-]+[<>=][^"]*)"', (DEPLOY / "Containerfile").read_text())) == wanted
