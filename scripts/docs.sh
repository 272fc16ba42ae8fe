#!/usr/bin/env bash
# Build the documentation into site/. Arguments go to mkdocs; `scripts/docs.sh serve` shows it while you write.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
make_environment docs
.venv/bin/python scripts/reference.py --check
.venv/bin/python scripts/benchmarks.py --check
exec .venv/bin/mkdocs "${1:-build}" --strict "${@:2}"
