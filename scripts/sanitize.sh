#!/bin/sh
# Builds the native tests and runs them: as they are, under the address and undefined-behaviour
# sanitizers, and under the thread sanitizer. Any report fails. An argument chooses one of the three:
# plain, address, thread. They are built in $BUILD, or build/native.
#
# What the kernel moves is invisible to the thread sanitizer. That makes no false reports, so nothing
# is suppressed; but races over bytes show only where the tests move them with memcpy, in
# queue_test.cpp, or by pread and pwrite, which it knows.
set -eu
cd "$(dirname "$0")/.."
core=offload/aio/native
build=${BUILD:-build/native}
mkdir -p "$build"

read -r compiler <<END
${CXX:-c++}
END
flags="-std=c++20 -g -Wall -Wextra -Werror -pthread -I$core -Itests/native"
# As in CMakeLists.txt: a checksum's tables are made by the compiler.
if $compiler --version | grep -q clang; then flags="$flags -fconstexpr-steps=10000000"; fi

for variant in ${*:-plain address thread}; do
    wrapper=
    case $variant in
        plain) options=${OPTIMIZE:--O2} ;;
        address) options="-O1 -fsanitize=address,undefined -fno-sanitize-recover=all" ;;
        thread)
            options="-O1 -fsanitize=thread"
            # Its place in memory is taken where addresses are random in more bits than it expects.
            if setarch -R true 2> /dev/null; then wrapper="setarch -R"; fi
            ;;
        *) echo "plain, address or thread, not $variant" >&2 && exit 2 ;;
    esac
    sources=$(ls $core/*.cpp tests/native/*.cpp | grep -v module.cpp)
    echo "== $variant"
    $compiler $flags $options $sources -o "$build/$variant"
    ASAN_OPTIONS=halt_on_error=1:detect_leaks=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
        TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1 $wrapper "$build/$variant"
done
