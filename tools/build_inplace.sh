#!/usr/bin/env bash
# Builds the native extension into src/quire, so that Quire runs with PYTHONPATH=src without being installed.
# PYTHON is an interpreter with nanobind, BUILD_DIR the build tree; further arguments are passed to cmake.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
build=${BUILD_DIR:-$root/build/inplace}
generator=()
if command -v ninja >/dev/null; then generator=(-G Ninja); fi
cmake -S "$root" -B "$build" "${generator[@]}" -DCMAKE_BUILD_TYPE=Release \
    -DPython_EXECUTABLE="$(command -v "$python")" -DQUIRE_WERROR=ON -DCMAKE_LIBRARY_OUTPUT_DIRECTORY="$root/src/quire" "$@" >/dev/null
cmake --build "$build" --parallel "${JOBS:-2}"
