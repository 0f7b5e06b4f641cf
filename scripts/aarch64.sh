#!/bin/sh
# Compiles the native code for aarch64 and runs it on this x86-64 machine, by emulation: the tests of I/O, and
# every kernel, whose bits must be those of this processor. Needs two packages of Debian:
# g++-aarch64-linux-gnu and qemu-user. Files go into $BUILD or build/aarch64.
set -eu
cd "$(dirname "$0")/.."
aio=offload/aio/native kernels=offload/kernels/native
build=${BUILD:-build/aarch64}
mkdir -p "$build"

flags="-std=c++20 -static -pthread -Wall -Wextra"
# As in CMakeLists.txt, which says why.
arithmetic="-O3 -fno-unswitch-loops -ffp-contract=off -fno-math-errno -fno-trapping-math"
sources() { ls "$@" | grep -v module.cpp; }

echo "== I/O on aarch64"
aarch64-linux-gnu-g++ $flags -O2 -I$aio -Itests/native $(sources $aio/*.cpp tests/native/*.cpp) -o "$build/aio"
qemu-aarch64 "$build/aio" | tail -n 1

echo "== kernels: the bits of aarch64 and of each instruction set here"
for compiler in g++ aarch64-linux-gnu-g++; do
    $compiler $flags $arithmetic -I$kernels $(sources $kernels/*.cpp tests/kernel_bits/*.cpp) -o "$build/bits-$compiler"
done
qemu-aarch64 "$build/bits-aarch64-linux-gnu-g++" > "$build/expected"
for isa in scalar avx2 avx512; do
    case $isa in scalar) ;; *) grep -qwE "${isa}f?" /proc/cpuinfo || { echo "$isa: not on this processor"; continue; } ;; esac
    "$build/bits-g++" $isa > "$build/$isa"
    diff "$build/expected" "$build/$isa"
    echo "$isa: $(wc -l < "$build/$isa") cases equal"
done
