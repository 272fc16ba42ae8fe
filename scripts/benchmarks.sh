#!/usr/bin/env bash
# Measure a benchmark again: rewrite docs/results/NAME.json and docs/benchmarks.md. Without a NAME, list them.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
make_environment test
exec .venv/bin/python scripts/benchmarks.py "$@"
