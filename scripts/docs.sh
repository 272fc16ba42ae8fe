#!/usr/bin/env bash
# Build the documentation into site/. Arguments go to mkdocs; `scripts/docs.sh serve` shows it while you write.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
make_environment docs
export NO_MKDOCS_2_WARNING=1 # an advertisement of mkdocs-material's
exec .venv/bin/mkdocs "${1:-build}" --strict "${@:2}"
