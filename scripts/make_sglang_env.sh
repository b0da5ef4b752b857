#!/usr/bin/env bash
# Builds the environment of `make interop` and `make matrix`: a real SGLang, whose host pools, cache controllers and storage
# drivers run on a machine without a GPU (and its server too, with tests/interop/stand_in before its other modules), Mooncake
# with its server, NIXL, PeerCache, the client of kvblockd, and this project, editable, with its conformance suite.
# On Debian and Ubuntu it also installs what apt has to bring, as root or with sudo. Takes about two minutes and 3 GB the first
# time, a second later.
#
# usage: scripts/make_sglang_env.sh DIR
set -euo pipefail

(( $# == 1 )) || { sed -n 's/^# usage: /usage: /p' "$0" >&2; exit 2; }
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
env_dir=$1
python=$env_dir/bin/python
sglang=0.5.23
mooncake=0.3.13.post1
# Drivers that are judged, and what they ask for. Of NIXL's wheels the one for CUDA 12 works without CUDA; the package nixl picks
# one by the version of torch, and asks for both. The client of kvblockd asks for blake3 and xxhash.
others=(nixl==1.5.1 nixl-cu12==1.5.1 peercache==0.8.4 sglang-kvblockd==0.1.0 kvblockd==0.1.0 blake3==1.0.11 xxhash==4.1.0)

# SGLang's own requirements ask for CUDA kernels that cannot be installed here, so it goes in alone, and these are the modules
# that it imports on the way to its storage layer and to its server. Pinned, because nothing else says which versions that version
# of it meets; triton is torch's choice, where torch has one.
needed=(
  aiohttp==3.14.5 apache-tvm-ffi==0.1.11 compressed-tensors==0.18.0 dill==0.4.1 einops==0.8.2 fastapi==0.165.0 gguf==0.19.0
  ipython==9.18.1 jsonschema==4.26.0 msgspec==0.23.0 numpy==2.4.6 openai==2.8.0 orjson==3.13.0 partial-json-parser==0.2.1.1.post7
  pillow==13.0.0 psutil==7.2.2 pybase64==1.5.1 python-multipart==0.0.34 pyzmq==27.3.0 requests==2.34.2 sentencepiece==0.2.3
  setproctitle==1.3.8 soundfile==0.14.0 tqdm==4.70.1 transformers==5.19.0 uvicorn==0.54.0 uvloop==0.23.0 xgrammar==0.2.7 triton
)

# shellcheck source=scripts/engine_env.sh
source "$root/scripts/engine_env.sh"

# SGLang's model code, and transformers when asked whether it is there, name torchvision. Neither the storage layer nor
# a model of text calls it.
stand_in_for_torchvision() {
  local site
  site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  if "$python" -m pip show --quiet torchvision 2>/dev/null && [[ ! -f $site/torchvision/STAND_IN ]]; then
    return
  fi
  mkdir -p "$site/torchvision" "$site/torchvision-0.28.0.dist-info"
  touch "$site/torchvision/STAND_IN"
  cat >"$site/torchvision/__init__.py" <<'PY'
"""Stands in for torchvision where it is named but never used: every module and every name exists and does nothing."""

import importlib.abc
import importlib.machinery
import sys

__version__ = "0.28.0"


class Nothing:
    """Any name of the real package; may be read from, called and subclassed."""

    def __init__(self, *args, **kwargs):
        pass

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()

    def __call__(self, *args, **kwargs):
        return self

    def __mro_entries__(self, bases):
        return (Nothing,)


class Modules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every submodule, empty."""

    def find_spec(self, name, path=None, target=None):
        if name.startswith("torchvision."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        module.__getattr__ = named


def named(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Nothing()


__getattr__ = named
sys.meta_path.append(Modules())
PY
  printf 'Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n' >"$site/torchvision-0.28.0.dist-info/METADATA"
  printf 'make_sglang_env\n' >"$site/torchvision-0.28.0.dist-info/INSTALLER"
  : >"$site/torchvision-0.28.0.dist-info/RECORD"
}

check_imports() {
  if ! "$python" -W ignore - >"$log" 2>&1 <<'PY'
import importlib

for name in (
    "mem_cache.hicache_storage",
    "mem_cache.storage.backend_factory",
    "mem_cache.pool_host.mha",
    "mem_cache.pool_host.mla",
    "mem_cache.pool_host.mamba",
    "managers.cache_controller",
    "mem_cache.hybrid_cache.hybrid_cache_controller",
    "observability.metrics_collector",
    "entrypoints.http_server",
):
    importlib.import_module(f"sglang.srt.{name}")
importlib.import_module("mooncake.store")
importlib.import_module("nixl._api")
importlib.import_module("peercache.store")
importlib.import_module("sglang_kvblockd")
PY
  then
    cat "$log" >&2
    echo "make_sglang_env: SGLang and the drivers are installed and cannot be imported" >&2
    exit 1
  fi
}

install_system_packages
peer=$(digest "$root/constraints.txt" "${BASH_SOURCE[0]}" "$root/scripts/engine_env.sh")
if ! is_done peer "$peer"; then
  begin_environment
  install --no-deps "sglang==$sglang"
  install "${needed[@]}"
  install "mooncake-transfer-engine-non-cuda==$mooncake"
  install --no-deps --only-binary :all: "${others[@]}"
  install "${for_tests[@]}"
  stand_in_for_torchvision
  check_imports
  mark_done peer "$peer"
fi

install_project
echo "$env_dir: SGLang $sglang on CPU with $("$python" -c 'from importlib.metadata import version; print("hicache-storage", version("hicache-storage"))')"
