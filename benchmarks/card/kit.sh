#!/usr/bin/env bash
# Packs what a machine with a card and no network needs: benchmarks/card/kit.sh KIT [--weights]
#
# KIT/wheels     ours and what a Python 3.12 with torch and transformers lacks, llama.cpp's wheel among them
# KIT/packets.pickle, KIT/tokenizer/     what is measured (`python -m sds.benchmarks.card.pack`)
# KIT/weights.NN with --weights: the embedded model's own file, 98 MB in parts of 48 MB that travel one at a time
#
# It needs `make install`, a Python 3.12 ($TARGET, python3.12 unless said), PyPI, and a C++ compiler. Everything but the
# weights takes at most $KIT_MB_MAX (60) megabytes.
set -euo pipefail
cd "$(dirname "$0")/../.."
KIT=${1:?where to? benchmarks/card/kit.sh KIT [--weights]}
HERE=${PYTHON:-.venv/bin/python}
TARGET=${TARGET:-python3.12}
command -v "$TARGET" >/dev/null || { echo "error: $TARGET is not there; set TARGET to a Python 3.12" >&2; exit 2; }
mkdir -p "$KIT/wheels"
# Ours is built here, for its int8 engine is compiled; the rest are wheels, all but llama.cpp's as PyPI has them.
"$TARGET" -m pip wheel --quiet --no-deps --wheel-dir "$KIT/wheels" .
if [ -z "${OFFLINE:-}" ]; then
  "$TARGET" -m pip wheel --quiet --no-deps --wheel-dir "$KIT/wheels" --constraint constraints.txt --requirement benchmarks/card/requirements.txt
fi
"$HERE" -m sds.benchmarks.card.pack "$KIT" --n "${N:-64}" ${2:+"$2"}
cp benchmarks/card/run.sh "$KIT/"
SIZE=$(du --apparent-size --block-size=1000000 --summarize --exclude 'weights.*' "$KIT" | cut -f1)
echo "$KIT: $SIZE MB$([ -n "${2:-}" ] && echo ', and the weights')"
[ "$SIZE" -le "${KIT_MB_MAX:-60}" ] || { echo "error: over ${KIT_MB_MAX:-60} MB" >&2; exit 1; }
