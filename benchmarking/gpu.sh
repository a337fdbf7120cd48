#!/usr/bin/env bash
# Measure this package on one GPU, in one command and about ten minutes: see docs/gpu.md and gpu.py.
#
#     benchmarking/gpu.sh OUT [cuda|cpu] [PYTHON]
#
# PYTHON: one that has torch, transformers and peft; without it that of .venv, else python3. The package need not be
# installed. `cpu` runs the same parts on tiny models, to try the script.
set -u
out=${1:?usage: benchmarking/gpu.sh OUT [cuda|cpu] [PYTHON]}
root=$(cd "$(dirname "$0")/.." && pwd)
python=${3:-$root/.venv/bin/python}
[ -n "${3:-}" ] || [ -x "$python" ] || python=python3
exec "$python" "$root/benchmarking/gpu.py" "$out" --device "${2:-cuda}"
