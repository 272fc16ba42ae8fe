#!/usr/bin/env bash
# All that one GPU can tell of this checkout in 8 minutes: its tests, two NCCL ranks on it, what a step costs the GPU
# and the host, what DALI decodes. Needs torch from 2.11, pyproject.toml's packages (not DALI) and pytest; no network.
#
#     scripts/gpu-check.sh [REPORT]              # default: gpu-check.md; PYTHON=... chooses the interpreter
#     scripts/gpu-check.sh --long [REPORT]       # more rounds, more sections, no limits: half an hour or so
#     scripts/gpu-check.sh --dry-run [REPORT]    # the same on a CPU, as small as it goes
#
# Exit codes: 0 every section ended well, 1 one did not (the report says which), 2 usage.
set -uo pipefail

dry='' long=''
case ${1:-} in
--dry-run) dry=1 && shift ;;
--long) long=1 && shift ;;
esac
report=${1:-gpu-check.md}
if [ $# -gt 1 ] || [ "${report#-}" != "$report" ]; then
    echo "error: usage: scripts/gpu-check.sh [--dry-run | --long] [REPORT]" >&2
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
if [ -n "$dry" ]; then
    export CUDA_VISIBLE_DEVICES='' OMP_NUM_THREADS=1
fi
parts=$(mktemp -d)
trap 'rm -rf "$parts"' EXIT
trap 'kill $(jobs -p); exit 130' INT TERM
count=0

# section NAME LIMIT COMMAND...: what it prints goes into the report; after LIMIT seconds it is ended.
section() {
    count=$((count + 1))
    local part
    part=$parts/$(printf %02d "$count")
    echo "$1"
    if [ -n "$dry" ]; then # all at once, so each is given more time
        run_section "$part" "$1" $((20 * $2)) "${@:3}" &
    else
        run_section "$part" "$1" $((long ? 0 : $2)) "${@:3}" # 0: without a limit
        write_report
    fi
}

run_section() {
    local part=$1 name=$2 limit=$3 begun=$EPOCHREALTIME code seconds why=
    shift 3
    trap 'kill $(jobs -p); exit 130' INT TERM # a subshell, as in a dry run, has lost it
    # In the background, since bash hears of Ctrl-C in a `wait` alone.
    timeout --kill-after=5 "$limit" "$@" >"$part.out" 2>&1 </dev/null &
    wait $!
    code=$?
    seconds=$(awk "BEGIN { printf \"%.1f\", $EPOCHREALTIME - $begun }")
    case $code in 124 | 137) why=' (it reached its limit)' ;; esac
    [ "$limit" -gt 0 ] || limit=–
    echo "| $name | $code$why | $seconds | $limit |" >"$part.row"
    {
        printf '\n## %s\n\nExit code %s%s after %s s.\n\n   ' "$name" "$code" "$why" "$seconds"
        printf ' %q' "$@"
        printf '\n\n```\n'
        cat "$part.out"
        printf '```\n'
    } >"$part.md"
    [ "$code" -eq 0 ] || : >"$parts/failed"
}

# omitted NAME WHY: a section that is left out.
omitted() {
    count=$((count + 1))
    local part
    part=$parts/$(printf %02d "$count")
    echo "| $1 | not run | | |" >"$part.row"
    printf '\n## %s\n\nNot run: %s.\n' "$1" "$2" >"$part.md"
}

write_report() {
    {
        printf '# What one GPU tells%s\n\n' "${dry:+: a dry run without it}"
        printf '| section | exit code | seconds | at most |\n|---|---|---|---|\n'
        cat "$parts"/*.row "$parts"/*.md
    } >"$report"
}

tests() { # NAME LIMIT ARGUMENTS...
    section "$1" "$2" "$python" -m pytest -m '' -p no:cacheprovider -rs "${@:3}"
}

bench() { # NAME LIMIT ARGUMENTS...
    section "$1" "$2" "$python" -m imagenet_fast bench "${@:3}"
}

gpu_only() { # HOW NAME LIMIT ARGUMENTS..., where HOW is section, tests or bench
    if [ -n "$dry" ]; then
        omitted "$2" "it is a GPU's"
    else
        "$@"
    fi
}

# The limits add up to 8 minutes.
section "environment" 20 "$python" scripts/gpu_environment.py
tests "tests on one GPU" 75 tests/gpu --ignore=tests/gpu/test_two_ranks.py --ignore=tests/gpu/test_reused_memory.py
tests "two NCCL ranks on one GPU" 45 -vv tests/gpu/test_two_ranks.py tests/gpu/test_reused_memory.py
PYTORCH_NO_CUDA_MEMORY_CACHING=1 gpu_only tests "the same without the caching allocator" 15 -vv \
    tests/gpu/test_reused_memory.py
TORCH_DIST_USE_NCCL2=0 gpu_only tests "two NCCL ranks by torch's older backend" 45 -vv \
    tests/gpu/test_two_ranks.py tests/gpu/test_reused_memory.py
rounds=(--rounds $((long ? 60 : 15)) --steps 2)
for compile in '' --compile; do
    for model in resnet50 alexnet; do
        for precision in bf16 fp16; do
            name="step of $model, $precision${compile:+, compiled}"
            case $model$compile in
            resnet50) limit=20 size=(--image-size 224 --batch 128) ;;
            resnet50--compile) limit=65 size=(--image-size 224 --batch 128) ;;
            alexnet) limit=20 size=(--image-size 224 --batch 512) ;;
            alexnet--compile) limit=30 size=(--image-size 224 --batch 512) ;;
            esac
            if [ -z "$long" ] && [ "$precision$compile" = fp16--compile ]; then
                omitted "$name" "only --long has time for it"
                continue
            fi
            if [ -n "$dry" ]; then
                if [ "$model $precision$compile" != "resnet50 bf16" ]; then
                    omitted "$name" "a CPU has time for ResNet-50 in bf16 alone, and not to compile it"
                    continue
                fi
                size=(--image-size 32 --batch 2) rounds=(--rounds 1 --steps 1)
            fi
            bench "$name" "$limit" step --model "$model" --precision "$precision" ${compile:+"$compile"} \
                "${size[@]}" "${rounds[@]}"
        done
    done
done
size=(--model resnet50 --sync 'lazy,hybrid,dear,powersgd,sparse' --image-size 224 --batch 128)
if [ -n "$dry" ]; then
    size=(--model resnet18 --sync 'lazy,dear' --image-size 32 --batch 2)
fi
bench "host and GPU time of each engine" 30 step "${size[@]}" "${rounds[@]}"
gpu_only section "a step as one CUDA graph" 20 "$python" scripts/graphed_step.py
bench "kernels of an optimizer's step" 20 kernels --model resnet50
if [ -n "$dry" ]; then
    bench "loaders" 35 data --rounds 1 --loaders synthetic,dali --image-size 32 --batch 2 --workers 1 --seconds 0.1
else
    bench "loaders" 35 data --rounds 1 --loaders synthetic,dali --batch 128 --seconds 5
    for workers in ${long:+1 2 4 8 16}; do
        bench "DALI by $workers threads" 0 data --rounds 1 --loaders dali --batch 256 --seconds 10 --workers "$workers"
    done
fi
wait
write_report
echo "in $report"
[ ! -e "$parts/failed" ]
