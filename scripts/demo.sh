#!/usr/bin/env bash
# Train the demo: real digits, 2 ranks under torchrun, to 97 % top-1. Arguments go to `imagenet-fast train`.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
make_environment demo
exec .venv/bin/imagenet-fast train --recipe demo "$@"
