#!/usr/bin/env bash
# Measure this package on one GPU, in one command and under ten minutes.
#
#     benchmarking/gpu.sh OUT [cuda|cpu] [PYTHON]
#
# Every part has a time limit of its own and writes OUT/<part>.json and OUT/<part>.log; a part that fails, runs out of
# time or is not installed is recorded in OUT/summary.json, and the others go on. A JSON file is there whole or not at
# all. The exit code is 0 when every part that could run did. `cpu` runs the same parts on tiny models, to try the script.
set -u
out=${1:?usage: benchmarking/gpu.sh OUT [cuda|cpu] [PYTHON]}
device=${2:-cuda}
root=$(cd "$(dirname "$0")/.." && pwd)
python=${3:-$root/.venv/bin/python}
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 2
cd "$root" || exit 2
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
started=$SECONDS
budget=${BUDGET:-570} # seconds for everything
failed=0

# record NAME STATUS SECONDS: put a part's outcome into summary.json, whole or not at all.
record() {
    "$python" - "$out/summary.json" "$device" "$@" <<'PYTHON'
import json, os, sys
path, device, name, status, seconds = sys.argv[1:]
document = json.load(open(path)) if os.path.exists(path) else {"device": device, "parts": {}}
document["parts"][name] = {"status": status, "seconds": int(seconds)}
with open(path + ".tmp", "w") as file:
    json.dump(document, file, indent=1)
os.replace(path + ".tmp", path)
PYTHON
    echo "$1: $2 (${3} s)"
}

# part NAME LIMIT COMMAND...: the command gets the name of the JSON file that it writes as $json.
part() {
    local name=$1 limit=$2 left=$((budget - (SECONDS - started))) before=$SECONDS code status
    shift 2
    if [ "$left" -lt 5 ]; then
        failed=1
        record "$name" "not run: the time was up" 0
        return
    fi
    [ "$limit" -gt "$left" ] && limit=$left
    rm -f "$out/$name.json" "$out/$name.part"
    timeout --kill-after=10 "$limit" "$@" >"$out/$name.log" 2>&1
    code=$?
    case $code in
        0) status=done ;;
        124 | 137) status="stopped after its limit of $limit s" ;;
        *) status="failed with exit code $code: $(tail -n 1 "$out/$name.log" | cut -c1-200)" ;;
    esac
    if [ $code -eq 0 ] && ! "$python" -c 'import json, sys; json.load(open(sys.argv[1]))' "$out/$name.part" 2>/dev/null; then
        code=1 status="failed: it wrote no JSON"
    fi
    if [ $code -eq 0 ]; then mv "$out/$name.part" "$out/$name.json"; else
        failed=1
        rm -f "$out/$name.part"
    fi
    record "$name" "$status" $((SECONDS - before))
}

# script NAME LIMIT FILE OPTIONS...: a part that is one of the scripts beside this one.
script() {
    local name=$1 limit=$2 file=$3
    shift 3
    if [ ! -f "benchmarking/$file" ]; then
        failed=1
        record "$name" "not run: benchmarking/$file is not there" 0
        return
    fi
    part "$name" "$limit" "$python" "benchmarking/$file" --device "$device" --out "$out/$name.part" "$@"
}

rm -f "$out/summary.json"
if [ "$device" = cuda ]; then
    roofline=(--models 0.5B 1.5B --rounds 3)
    rollout=(--model 0.5B --rounds 3)
    memory=(--model 0.5B --arms plain checkpointing)
    size=0.5B
else
    roofline=(--models 1M --rounds 1)
    rollout=(--rounds 1 --tokens 8)
    memory=(--model 5M --arms plain)
    size=1M
fi
part environment 60 bash -c "'$python' -m agilerl.cli env --json >'$out/environment.part'"
if [ "$device" = cuda ]; then
    # pytest ends with 5 where it has found nothing to run: that is no test passed.
    part gpu-tests 90 bash -c "'$python' -m pytest -p no:cacheprovider -q -m gpu tests; code=\$?
        [ \$code -ne 5 ] || echo 'no test is marked gpu'
        [ \$code -eq 0 ] || exit \$code
        echo '{\"exit code of pytest -m gpu\": 0}' >'$out/gpu-tests.part'"
fi
script bits 60 bits.py --model "$size"
script roofline 180 roofline.py "${roofline[@]}"
script rollout 120 rollout.py "${rollout[@]}"
script memory 120 memory_estimate.py "${memory[@]}"
echo "$out/summary.json, after $((SECONDS - started)) s"
exit $failed
