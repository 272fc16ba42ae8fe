#!/usr/bin/env bash
# Run the tests that one waits for; `ci` adds those of .ci/run, `weekly` runs those that take hours. Further arguments
# go to pytest; `-n 0` runs one test after another.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
make_environment test
tier=()
case "${1-}" in
  ci) tier=(-m "not weekly") && shift ;;
  weekly) tier=(-m weekly) && shift ;;
esac
exec .venv/bin/python -m pytest -n 2 --dist worksteal "${tier[@]}" "$@"
