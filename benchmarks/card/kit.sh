#!/usr/bin/env bash
# Pack what a machine with a card and no network needs: benchmarks/card/kit.sh KIT [--weights]
#
# KIT/wheels     our wheel, and those that a Python 3.12 with torch and transformers lacks, llama.cpp's among them
# KIT/packets.pickle, KIT/tokenizer/     what is measured (`python -m sds.benchmarks.card.pack`)
# KIT/weights.NN with --weights: the embedded model's file, 98 MB in parts of 48 MB, to be copied one at a time
#
# It needs `make install`, PyPI and a C++ compiler, but no Python 3.12: our wheel and llama.cpp's are for any Python, the
# others are downloaded for $FOR (3.12). Our wheel leaves out the fitted readers. Without weights: $KIT_MB_MAX (60) MB at most.
set -euo pipefail
cd "$(dirname "$0")/../.."
KIT=${1:?where to? benchmarks/card/kit.sh KIT [--weights]}
HERE=${PYTHON:-.venv/bin/python}
FOR=${FOR:-3.12}
mkdir -p "$KIT/wheels"
SOURCES=$(mktemp -d); trap 'rm -rf "$SOURCES"' EXIT
git ls-files -z | grep -zv '^sds/gates/[^/]*/readers/' | tar --create --null --files-from - | tar --extract --directory "$SOURCES"
"$HERE" -m pip wheel --quiet --no-deps --wheel-dir "$KIT/wheels" "$SOURCES"
if [ -z "${OFFLINE:-}" ]; then
  "$HERE" -m pip wheel --quiet --no-deps --wheel-dir "$KIT/wheels" --constraint constraints.txt llama-cpp-python
  PLATFORMS=$(printf ' --platform manylinux_2_%s_x86_64' 34 31 28 27 24 17 12 5; printf ' --platform %s' manylinux2014_x86_64 linux_x86_64)
  # shellcheck disable=SC2086  many words
  "$HERE" -m pip download --quiet --no-deps --only-binary=:all: --python-version "$FOR" --implementation cp \
    --abi "cp${FOR/./}" --abi abi3 --abi none $PLATFORMS --dest "$KIT/wheels" --find-links "$KIT/wheels" \
    --constraint constraints.txt --requirement benchmarks/card/requirements.txt
fi
"$HERE" -m sds.benchmarks.card.pack "$KIT" --n "${N:-64}" ${2:+"$2"}
cp benchmarks/card/run.sh "$KIT/"
SIZE=$(du --apparent-size --block-size=1000000 --summarize --exclude 'weights.*' "$KIT" | cut -f1)
echo "$KIT: $SIZE MB$([ -n "${2:-}" ] && echo ', and the weights')"
[ "$SIZE" -le "${KIT_MB_MAX:-60}" ] || { echo "error: over ${KIT_MB_MAX:-60} MB" >&2; exit 1; }
