#!/usr/bin/env bash
# Run the whole test suite, three files at a time. Arguments go to pytest; `-n 0` runs one after another.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
make_environment test
exec .venv/bin/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@"
