#!/usr/bin/env bash
# Measure on a card, without a network, in one call: KIT/run.sh [OUT] [options that `sds bench gpu -h` lists ...]
#
# Python 3.12 ($PYTHON) must have torch and transformers; the rest is installed from KIT/wheels into a temporary folder.
# OUT gets gpu.json and page.md. It ends within ten minutes: after $MINUTES (8) no new measurement begins.
set -euo pipefail
KIT=$(cd "$(dirname "$0")" && pwd)
OUT=${1:-out}; [ $# -eq 0 ] || shift
PYTHON=${PYTHON:-python3}
mkdir -p "$OUT"
BASE=$(mktemp -d); trap 'rm -rf "$BASE"' EXIT
# Into a folder that comes before the image's own packages, and not over them: torch stays as it is.
"$PYTHON" -m pip install --quiet --no-index --no-deps --no-warn-script-location --target "$BASE" "$KIT"/wheels/*.whl
export PYTHONPATH="$BASE" PYTHONDONTWRITEBYTECODE=1 PYTHONWARNINGS=ignore TOKENIZERS_PARALLELISM=false KINETO_LOG_LEVEL=5
[ $# -gt 0 ] || set -- --device cuda --shapes smollm2-135m,qwen2-1.5b,llama-8b
"$PYTHON" -m sds.benchmarks.gpu --kit "$KIT" --minutes "${MINUTES:-8}" --save "$OUT" "$@"
"$PYTHON" -m sds.benchmarks.card.page "$OUT/gpu.json" "$OUT/page.md"
