#!/usr/bin/env bash
# Run the whole test suite. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
make_environment test
exec .venv/bin/python -m pytest "$@"
