#!/usr/bin/env bash
# Everything that needs several GPUs of one machine, in one command and within nine minutes:
#
#     scripts/measure_multi_gpu.sh [FOLDER]        default: runs/multi-gpu of the repository
#
# 1. the sdma transport's tests on two GPUs          tests.txt
# 2. collectives under GEMMs, whole layers           tp.txt    tp.jsonl
# 3. ring attention                                  cp.txt    cp.jsonl
# 4. weak scaling over 1, 2, 4 and 8 GPUs            weak.txt  weak.jsonl
# 5. Markdown for docs/performance.md and the numbers for communication/costs.py       report.md
#
# Rows are printed and kept as they are measured, so that a run that is cut short has measured something. A step that fails does
# not keep the next from running; the exit code says whether all of them ended well. Settings, as variables:
#
#     TURBO_RANKS      number of GPUs; default: all of them (2 gives the tables of two ranks on a larger machine)
#     PYTHON           which Python; default python3
#     TURBO_SECONDS    for everything together; default 530
#     TURBO_DRY_RUN    1: tiny sizes on CPU processes over gloo and shared memory; shows that it runs, measures nothing
set -u
case "${1:-}" in
    -h | --help) sed -n '2,/^set -u/{/^#/s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}" && exit ;;
    -*) echo "error: $1: there are no options; a folder and variables, see --help." >&2 && exit 2 ;;
esac
repository="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
folder="${1:-$repository/runs/multi-gpu}"
case "$folder" in /*) ;; *) folder="$PWD/$folder" ;; esac
cd "$repository" || exit 2
python="${PYTHON:-python3}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
total="${TURBO_SECONDS:-530}"
failed=0

if [ "${TURBO_DRY_RUN:-0}" = 1 ]; then
    export OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"
    there=64 ranks="${TURBO_RANKS:-2}"
    tp=(--device cpu --scale 128 --iterations 1)
    cp=(--device cpu --algorithms p2p)
    weak=(--device cpu --scale 128 --layers 1 --iterations 1 --ranks 1 "$ranks")
else
    there="$("$python" -c 'import torch; print(torch.cuda.device_count())')" || exit 2
    if [ "$there" -lt 2 ]; then
        echo "error: two GPUs or more are needed, this machine has $there. TURBO_DRY_RUN=1 shows on a CPU that everything runs." >&2
        exit 2
    fi
    ranks="${TURBO_RANKS:-$there}"
    tp=() cp=(--algorithms p2p a2a) weak=(--ranks)
    for count in 1 2 4 8; do [ "$count" -le "$ranks" ] 2>/dev/null && weak+=("$count"); done
fi
if ! [ "$ranks" -ge 2 ] 2>/dev/null || [ "$ranks" -gt "$there" ]; then
    echo "error: TURBO_RANKS=$ranks: must be a number from 2 to $there." >&2
    exit 2
fi
mkdir -p "$folder" || exit 2
rm -f "$folder"/{tp,cp,weak}.jsonl "$folder"/{tests,tp,cp,weak}.txt "$folder/report.md" # of a run before

# step NAME SECONDS COMMAND...: runs it in its share of the time, showing and keeping what it prints.
step() {
    local name="$1" share="$2" left code
    shift 2
    left=$((total - SECONDS))
    if [ "$left" -lt 20 ]; then
        echo "== $name: no time left"
        failed=1
        return
    fi
    [ "$share" -gt "$left" ] && share="$left"
    echo "== $name, at most $share s, $SECONDS s of $total s gone"
    timeout --kill-after=5 "$share" "$@" 2>&1 | tee "$folder/$name.txt"
    code="${PIPESTATUS[0]}"
    [ "$code" -ne 0 ] && echo "== $name ended with code $code" && failed=1
}

"$python" - "$ranks" "${TURBO_DRY_RUN:-0}" >"$folder/machine.txt" <<'END'
import datetime, subprocess, sys
import torch

commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
if sys.argv[2] == "1":
    print("A dry run on CPU processes: no number below means anything.")
else:
    driver = torch.version.hip or torch.version.cuda
    name = torch.cuda.get_device_name()
    print(f"{sys.argv[1]} x {name}, torch {torch.__version__} ({driver}), commit {commit or 'unknown'}, {datetime.date.today()}.")
END
cat "$folder/machine.txt"

torchrun=("$python" -m torch.distributed.run --standalone --nproc-per-node "$ranks")
budget() { echo $(($1 < total - SECONDS ? $1 : total - SECONDS)); }

if [ "${TURBO_DRY_RUN:-0}" = 1 ]; then
    echo "== tests: skipped, they need GPUs"
elif "$python" -c 'import pytest' 2>/dev/null; then
    decisive="layer or probe or named or (delays and True) or (captured_collectives and True)" # the others vary what is slower
    step tests 65 "$python" -m pytest -v -o addopts= -p no:xdist -p no:cacheprovider -k "$decisive" tests/distributed/test_overlap_sdma.py
else
    echo "== tests: skipped, pytest is not installed"
fi
step tp 220 "${torchrun[@]}" benchmarks/tp_overlap.py "${tp[@]}" --budget "$(budget 195)" --json "$folder/tp.jsonl"
step cp 90 "$python" -m benchmarks.context_parallel --ranks "$ranks" "${cp[@]}" --json "$folder/cp.jsonl"
step weak 145 "$python" -m benchmarks.weak_scaling "${weak[@]}" --budget "$(budget 125)" --json "$folder/weak.jsonl"
"$python" -m benchmarks.multi_gpu_report "$folder" | tee "$folder/report.md"
echo "== $SECONDS s; files in $folder"
exit "$failed"
