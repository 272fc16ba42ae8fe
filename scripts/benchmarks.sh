#!/usr/bin/env bash
# Measure a benchmark again: rewrite docs/results/NAME.json and docs/benchmarks.md. Without a NAME, list them.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
if [ $# -eq 1 ] && [ -e "docs/results/$1.json" ]; then # only measuring needs the environment
    source scripts/environment.sh
    make_environment test
    python=.venv/bin/python
fi
exec "$python" scripts/benchmarks.py "$@"
