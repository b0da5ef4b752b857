"""What doctor says of an engine's command line; no engine is needed."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from hicache_storage.tools.doctor import DoctorTarget, Status, engine_command, lmcache, vllm
from hicache_storage.tools.doctor.engine_command import EngineCommand
from hicache_storage.tools.doctor.examination import planned, with_engines_driver
from tests.support.commands import run_here, run_hicache


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine with both engines; a test may change it."""
    state = SimpleNamespace(versions={"vllm": "0.32.0", "lmcache": "0.5.6"})

    def version(name):
        if name not in state.versions:
            raise engine_command.PackageNotFoundError(name)
        return state.versions[name]

    monkeypatch.setattr(engine_command, "version", version)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    return state


# vLLM
# --------------------------------------------------------------------------------------------------

TIER = {
    "type": "HiCacheTier",
    "module_path": "hicache_storage.engines.vllm",
    "driver": "file",
    "driver_config": {"path": "/data/hicache"},
}


def transfer(tier=None, extra=None, **changes):
    """Return vLLM's configuration, with what a test changes; a value of None removes a key."""
    options = {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": 10 << 30,
        "offload_prompt_only": False,
        "secondary_tiers": [_without_none({**TIER, **(tier or {})})],
        **(extra or {}),
    }
    found = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": _without_none(options),
    }
    return json.dumps(_without_none({**found, **changes}))


def _without_none(options):
    return {name: value for name, value in options.items() if value is not None}


def of_vllm(config=None, *words, algorithm="sha256_cbor"):
    """Return the findings of a `vllm serve` that has a configuration, or none."""
    command = ["serve", "MODEL", "--prefix-caching-hash-algo", algorithm, *words]
    if config is not None:
        command += ["--kv-transfer-config", config]
    return list(vllm.check_vllm(DoctorTarget(engine="vllm", command_line=command)))


def bad(findings):
    """Return what is not right, as `status check: detail`; each has a fix."""
    wrong = [finding for finding in findings if finding.status is not Status.OK]
    assert all(finding.fix for finding in wrong)
    return [f"{finding.status} {finding.check}: {finding.detail}" for finding in wrong]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (transfer(kv_connector="SharedStorageConnector"), "fail vllm: connector: kv_connector is"),
        (transfer(kv_connector="LMCacheMPConnector"), "leads to LMCache's server"),
        (transfer(extra={"spec_name": None}), "CPUOffloadingSpec, which ignores secondary_tiers"),
        (transfer(extra={"secondary_tiers": []}), "has no tier, and not the bridge"),
        (
            transfer(extra={"secondary_tiers": [{"type": "fs", "root_dir": "/data"}]}),
            "secondary_tiers has fs, and not the bridge",
        ),
        (transfer(extra={"secondary_tiers": [TIER, TIER]}), "warn vllm: tier: 2 entries name"),
        (
            transfer(extra={"offload_prompt_only": None}),
            "warn vllm: generated tokens: offload_prompt_only is true by default",
        ),
        ("{", "fail vllm: --kv-transfer-config: is no JSON"),
        ("[]", "fail vllm: --kv-transfer-config: is no JSON object"),
    ],
)
def test_a_configuration_that_is_not_served_as_it_is_meant(config, said):
    assert any(said in line for line in bad(of_vllm(config))), bad(of_vllm(config))


def test_a_connector_among_several():
    several = json.dumps(
        {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "connectors": [{"kv_connector": "NixlConnector"}, json.loads(transfer())]
            },
        }
    )
    assert bad(of_vllm(several)) == []


@pytest.mark.parametrize(
    ("algorithm", "seed", "said"),
    [
        ("sha256_cbor", None, "ok sha256_cbor, vLLM's fixed seed"),
        ("sha256_cbor", "0", "ok sha256_cbor, seed PYTHONHASHSEED=0, which has to be the same"),
        ("sha256", None, "warn sha256 hashes what Python pickles"),
        ("xxhash", None, "fail xxhash without PYTHONHASHSEED: keys are random in each process"),
        ("xxhash_cbor", "0", "warn xxhash_cbor is not collision resistant"),
    ],
)
def test_keys_after_a_restart(monkeypatch, algorithm, seed, said):
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    findings = of_vllm(algorithm=algorithm)
    [finding] = [finding for finding in findings if finding.check == "vllm: keys"]
    assert f"{finding.status} {finding.detail}".startswith(said)


def test_versions(machine):
    machine.versions = {"vllm": "0.33.1", "lmcache": "0.5.6"}
    assert bad(of_vllm(transfer())) == []
    machine.versions = {"vllm": "0.34.0"}
    assert "warn vllm: version: 0.34.0 (vllm); the bridge is tested with" in bad(of_vllm())[0]


def test_an_engine_that_is_not_installed_here(machine):
    machine.versions = {}
    [said] = bad(of_vllm(transfer()))
    assert said.startswith("warn vllm: version: not installed in this environment")


@pytest.mark.parametrize(
    ("words", "tier", "said"),
    [
        (("--quantization", "fp8"), {}, "--quantization changes the KV of a prompt"),
        (("--hf-overrides={}",), {}, "--hf-overrides changes the KV of a prompt"),
        (("--quantization", "fp8"), {"revision": "fp8"}, ""),
        (("--enable-sleep-mode",), {}, "nothing is served from then on"),
        (("--enable-sleep-mode",), {"on_reset": "keep"}, ""),
    ],
)
def test_what_the_identity_does_not_know(words, tier, said):
    assert [said in line for line in bad(of_vllm(transfer(tier), *words))] == [True] * bool(said)


# LMCache
# --------------------------------------------------------------------------------------------------

ADAPTER = {
    "type": "plugin",
    "module_path": "hicache_storage.engines.lmcache",
    "class_name": "HiCacheL2Adapter",
    "adapter_params": {"driver": "file", "driver_config": {"path": "/data/hicache"}},
}


def of_lmcache(*words, adapter=None):
    """Return the findings of an `lmcache server` that has an adapter."""
    text = json.dumps(_without_none({**ADAPTER, **(adapter or {})}))
    command = ["server", "--l2-adapter", text, *words]
    return list(lmcache.check_lmcache(DoctorTarget(engine="lmcache", command_line=command)))


@pytest.mark.parametrize(
    ("words", "changes", "said"),
    [
        ("", {"serde": {"type": "fp8"}}, "fail lmcache: adapter: serde: the length of what"),
        ("", {"module_path": None, "class_name": None}, "no --l2-adapter names the bridge"),
        ("--hash-algorithm sha256_cbor", {}, "warn lmcache: keys: sha256_cbor is vLLM's"),
        ("--hash-algorithm builtin", {}, "fail lmcache: keys: 'builtin' is Python's own"),
    ],
)
def test_a_server_that_does_not_serve_it_as_it_is_meant(words, changes, said):
    found = bad(of_lmcache(*words.split(), adapter=changes))
    assert any(said in line for line in found), found


def test_another_version_of_lmcache(machine):
    machine.versions = {"lmcache": "0.5.7"}
    [said] = bad(of_lmcache())
    assert "0.5.7 (lmcache); the bridge is tested with 0.5.6" in said


# The command line
# --------------------------------------------------------------------------------------------------


def test_options_and_arguments():
    command = EngineCommand.parse(
        ["serve", "--flag", "--a_b", "1", "M", "--c=", "--a-b=2", "--json", '{"x": -1}']
    )
    assert command.arguments == ["serve", "M"]
    assert command.options == {
        "--flag": [""],
        "--a-b": ["1", "2"],
        "--c": [""],
        "--json": ['{"x": -1}'],
    }
    assert command.value("--x", "--a-b") == "2"


@pytest.mark.parametrize(
    ("words", "known"),
    [
        (["serve", "MODEL", f"--kv_transfer_config={transfer()}"], True),
        ([transfer()], True),
        ([], False),
        (["{"], False),
    ],
    ids=["option", "alone", "nothing", "broken"],
)
def test_the_driver_is_that_of_the_command_line(words, known):
    target = with_engines_driver(DoctorTarget(engine="vllm", command_line=words))
    assert target.driver == ("file" if known else None)
    assert target.options == ({"path": "/data/hicache"} if known else {})
    assert ("round trip" in planned(target)) is known
    assert "vllm" in planned(target)
    assert "lmcache" not in planned(target)
    assert not {"vllm", "lmcache"} & set(planned(DoctorTarget(driver="file")))


def test_adapters_of_others_are_passed_over():
    words = ["--l2-adapter", '{"type": "fs"}', "--l2-adapter", json.dumps(ADAPTER)]
    target = with_engines_driver(DoctorTarget(engine="lmcache", command_line=words))
    assert target.driver == "file"


@pytest.mark.slow(seconds=20)
def test_the_command_in_front_of_an_engines_own(tmp_path):
    words = ("serve", "MODEL", "--config", "of-vllm.yaml", "-c", "x")
    config = transfer({"driver_config": {"path": str(tmp_path)}}, {"cpu_bytes_to_use": 4096})
    done = run_hicache("doctor", "--json", "vllm", *words, "--kv-transfer-config", config)
    answer = json.loads(done.stdout)
    assert (answer["engine"], answer["driver"]) == ("vllm", "file")
    checks = {finding["check"]: finding["status"] for finding in answer["findings"]}
    assert checks["vllm: tier"] == "ok"
    assert checks["file: round trip"] == "ok"
    assert not [file for file in tmp_path.rglob("*.bundle") if file.stat().st_size >= 8192]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("file", "serve"), "a command line goes with vllm or lmcache"),
        (("-c", "path=/tmp", "vllm"), "-c is an option of drivers"),
        (("-c", "path=/tmp"), "-c needs a DRIVER"),
        (("file", "-c", "path"), "-c 'path' is not of the form key=value"),
        (("--nonsense",), "No such option: --nonsense"),
        (("lmcache", "server", "--json"), "put --json before lmcache"),
    ],
)
def test_arguments_that_do_not_go_together(arguments, said):
    done = run_here("doctor", *arguments)
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())
