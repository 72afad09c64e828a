#!/usr/bin/env bash
# Installs redis-server and redis-cli for the tests, on Debian, without starting a service.
set -euo pipefail

if ! command -v apt-get >/dev/null || ((EUID)); then
  echo "redis-server is missing: install it (Debian: apt-get install redis-server) and try again" >&2
  exit 1
fi
export DEBIAN_FRONTEND=noninteractive
# Keeps the package from starting a server on the default port.
policy=/usr/sbin/policy-rc.d
if [[ ! -e $policy ]]; then
  printf '#!/bin/sh\nexit 101\n' >"$policy"
  chmod +x "$policy"
  trap 'rm -f "$policy"' EXIT
fi
apt-get update -qq
apt-get install -y -qq --no-install-recommends redis-server redis-tools >/dev/null
