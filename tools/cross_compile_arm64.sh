#!/usr/bin/env bash
# Compiles and links the native extension for 64-bit Arm with warnings as errors, without running it. It needs Debian's
# g++-aarch64-linux-gnu: root installs it if it is missing; if that fails, the script prints a message and succeeds.
# PYTHON is an interpreter with nanobind, BUILD_DIR the build tree.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
build=${BUILD_DIR:-$root/build/arm64}
compiler=aarch64-linux-gnu-g++
install() {
    timeout 60 apt-get update && timeout 120 apt-get install --yes --no-install-recommends g++-aarch64-linux-gnu
}
if ! command -v "$compiler" >/dev/null && ! { [ "$(id -u)" = 0 ] && install; } >/dev/null 2>&1; then
    echo "skipped: $compiler (Debian's g++-aarch64-linux-gnu) is missing and could not be installed"
    exit 0
fi
# fewer optimizations than for use: the emulator runs them for a few minutes
cmake -S "$root" -B "$build" -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG=-O2 \
    -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER="$compiler" \
    -DCMAKE_LIBRARY_OUTPUT_DIRECTORY="$build" \
    -DPython_EXECUTABLE="$(command -v "$python")" -DQUIRE_WERROR=ON \
    -DPython_INCLUDE_DIR="$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')" >/dev/null
cmake --build "$build" --parallel "${JOBS:-2}"
file=$(echo "$build"/_native*)
aarch64-linux-gnu-readelf --file-header "$file" | grep AArch64
