#!/usr/bin/env bash
# Succeeds if a paguro server of this machine answers at /health. The port is PAGURO_PORT, or 11434. Needs neither curl nor a key.
set -euo pipefail
exec 3<> "/dev/tcp/127.0.0.1/${PAGURO_PORT:-11434}"
printf 'GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n' >&3
read -r _ status _ <&3
[ "$status" = 200 ]
