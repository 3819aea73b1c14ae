#!/bin/sh
# Fails if an ISA variant's object file defines a symbol that the linker may merge with another file's: a function
# compiled with AVX-512 flags could then run on a CPU without it (see the one-definition rule in csrc/isa/simd.h).
# Usage: check_isa_symbols.sh NM OBJECT...
nm=$1
shift
if merged=$("$nm" -A -C "$@" | grep -E ' [WVu] ' | grep -vE 'quire::[a-z0-9_]+::'); then
    echo "These functions are not in an ISA variant's own namespace:" >&2
    echo "$merged" >&2
    exit 1
fi
