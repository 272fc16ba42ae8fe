#!/usr/bin/env bash
# All that one GPU can tell of this checkout: what a step costs the GPU and the host, launched and replayed from a CUDA
# graph, and what loaders give alone and beside it, in 8 minutes; and its tests, in 7. Needs torch from 2.11,
# pyproject.toml's packages (not DALI) and pytest; no network.
#
#     scripts/gpu-check.sh [speed|tests] [REPORT]   # default: both, gpu-check.md; PYTHON=... chooses the interpreter
#     scripts/gpu-check.sh --dry-run ...            # the same on a CPU, as small as it goes
#
# Exit codes: 0 every section ended well, 1 one did not (the report says which), 2 usage.
set -uo pipefail

dry=''
[ "${1-}" != --dry-run ] || { dry=1 && shift; }
half=''
case ${1-} in speed | tests) half=$1 && shift ;; esac
report=${1:-gpu-check.md}
if [ $# -gt 1 ] || [ "${report#-}" != "$report" ]; then
    echo "error: usage: scripts/gpu-check.sh [--dry-run] [speed|tests] [REPORT]" >&2
    exit 2
fi
python=${PYTHON:-python}
command -v "$python" >/dev/null || {
    echo "error: there is no $python; set PYTHON to an interpreter that has torch" >&2
    exit 2
}
case $python in */*) python=$(realpath -s "$python") ;; esac # a link of a virtual environment's is to be kept
: >>"$report" || exit 2
report=$(realpath "$report")
cd "$(dirname "$0")/.." || exit 2
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 COLUMNS=100 LC_ALL=C.UTF-8
[ -z "$dry" ] || export CUDA_VISIBLE_DEVICES='' OMP_NUM_THREADS=1
parts=$(mktemp -d)
trap 'rm -rf "$parts"' EXIT
trap 'kill $(jobs -p); exit 130' INT TERM
failed=0

# section NAME LIMIT COMMAND...: what it prints goes into the report; after LIMIT seconds it is ended,
# as by Ctrl-C, so that pytest still says what failed, and others where they were.
section() {
    local name=$1 limit=$2 begun=$EPOCHREALTIME code seconds why=
    shift 2
    echo "$name"
    [ -z "$dry" ] || limit=$((20 * limit))
    # In the background, since bash hears of Ctrl-C in a `wait` alone.
    timeout --signal=INT --kill-after=5 "$limit" env --default-signal=INT "$@" >"$parts/out" 2>&1 </dev/null &
    wait $!
    code=$?
    seconds=$(awk "BEGIN { printf \"%.1f\", $EPOCHREALTIME - $begun }")
    case $code in 124 | 137) why=' (it reached its limit)' ;; esac
    [ "$code" -eq 0 ] || failed=1
    echo "| $name | $code$why | $seconds | $limit |" >>"$parts/rows"
    {
        printf '\n## %s\n\nExit code %s%s after %s s.\n\n   ' "$name" "$code" "$why" "$seconds"
        printf ' %q' "$@"
        printf '\n\n```\n'
        cat "$parts/out"
        printf '```\n'
    } >>"$parts/texts"
    {
        printf '# What one GPU tells%s\n\n' "${dry:+: a dry run without it}"
        printf '| section | exit code | seconds | at most |\n|---|---|---|---|\n'
        cat "$parts/rows" "$parts/texts"
    } >"$report"
}

section "environment" 20 bash -c "git log -1 --format=%h; '$python' -m torch.utils.collect_env || exit
    nvidia-smi --query-gpu=power.limit,clocks.max.sm,clocks.max.memory --format=csv || true"

# The limits of this half add up to 8 minutes. The most decisive sections come first: what norms of our own save, and
# whether a replayed step of compiled blocks is as fast.
if [ "$half" != tests ]; then
    imagenet_fast=("$python" -m imagenet_fast)
    norms=("$python" -m experiments.norms)
    step=("${imagenet_fast[@]}" bench step --rounds 30 --graph)
    photos=(--model resnet50 --image-size 224)
    loaded=(--batch 128 --seconds 3)
    fed=("${imagenet_fast[@]}" bench step --rounds 2 --steps 10 --graph "${photos[@]}" --batch 128)
    if [ -n "$dry" ]; then
        step=("${imagenet_fast[@]}" bench step --rounds 1 --steps 1)
        section "resnet18, 2 images, with our norms and torch's" 40 "${norms[@]}" steps
        section "norms by shape" 30 "${norms[@]}" shapes
        section "resnet18, 2 images" 40 "${step[@]}" --model resnet18 --image-size 32 --batch 2 --sync 'lazy,dear'
        section "cifar10-94's network, 2 images" 25 "${step[@]}" --model cifarnet --image-size 32 --batch 2
        loaded=(--image-size 32 --batch 2 --workers 1 --seconds 0.1)
        fed=("${step[@]}" --model resnet18 --image-size 32 --batch 2 --workers 1)
    else
        section "resnet50, 128 images, with our norms and torch's" 65 "${norms[@]}" steps 128
        section "resnet50, 128 images, compiled" 90 "${step[@]}" "${photos[@]}" --batch 128 --compile
        section "resnet50, 40 images, with our norms and torch's" 45 "${norms[@]}" steps 40
        section "norms by shape, 128 images" 40 "${norms[@]}" shapes 128
        section "resnet50, 128 images, other engines" 45 "${step[@]}" "${photos[@]}" --batch 128 --sync 'hybrid,dear,sparse'
        section "alexnet, 512 images" 15 "${step[@]}" --model alexnet --image-size 224 --batch 512
        section "cifar10-94's network, 512 images" 15 "${step[@]}" --model cifarnet --image-size 32 --batch 512
    fi
    demo=("${imagenet_fast[@]}" train --recipe demo)
    [ -z "$dry" ] || demo+=(--set epochs=1 --set target_top1=1)
    section "demo, replayed" 25 "${demo[@]}" --out "$parts/replayed"
    section "demo, launched" 25 "${demo[@]}" --set graph=false --out "$parts/launched"
    section "loaders" 25 "${imagenet_fast[@]}" bench data --rounds 1 --loaders pixels,dali "${loaded[@]}"
    section "resnet50, 128 images, from stored pixels" 35 "${fed[@]}" --loader pixels
    roads=("$python" -m experiments.loaders --seconds 2)
    [ -z "$dry" ] || roads+=(--batch 2 --seconds 0.1)
    section "stored pixels, and JPEGs by DALI" 35 "${roads[@]}"
fi

if [ "$half" != speed ]; then
    tests=("$python" -m pytest -m '' -p no:cacheprovider -rfs -vv --tb=short)
    ranks=tests/gpu/test_two_ranks.py
    section "tests on one GPU" 150 "${tests[@]}" tests/gpu -k 'not compiled' "--ignore=$ranks"
    section "random numbers of compiled code" 60 "${tests[@]}" tests/gpu/test_cuda.py -k compiled
    # Where there is no second GPU they share one, which has not run yet. The tests have some 800 collectives, each of
    # which is said to take 9 ms then.
    section "two NCCL ranks" 60 "${tests[@]}" "$ranks"
    # Whoever uses memory that he has given back fails at once.
    section "two NCCL ranks without the caching allocator" 60 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 "${tests[@]}" "$ranks"
    section "two NCCL ranks by torch's older backend" 60 env TORCH_DIST_USE_NCCL2=0 "${tests[@]}" "$ranks"
fi
echo "in $report"
exit "$failed"
