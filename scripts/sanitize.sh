#!/bin/sh
# Builds the native tests of tests/native and runs them: as they are, under the sanitizers of addresses
# and of undefined behaviour, and under that of threads. Any report fails. Arguments choose among the
# three: plain, address, thread. $CXX compiles, into $BUILD or build/native.
#
# What io_uring and libaio move is invisible to the thread sanitizer. That makes no false reports, so
# nothing is suppressed; but a race over bytes shows only where a test moves them by memcpy, as in
# scripted.h, or by pread and pwrite, which it knows.
set -eu
cd "$(dirname "$0")/.."
core=offload/aio/native
build=${BUILD:-build/native}
mkdir -p "$build"

compiler=${CXX:-c++}
flags="-std=c++20 -Wall -Wextra -pthread -I$core -Itests/native"
# As in CMakeLists.txt: a checksum's tables are made by the compiler.
if $compiler --version | grep -q clang; then flags="$flags -fconstexpr-steps=10000000"; fi

# One file, since most of the time goes to headers.
for source in $core/*.cpp tests/native/*.cpp; do
    case $source in */module.cpp) ;; *) echo "#include \"$PWD/$source\"" ;; esac
done > "$build/all.cpp"

for variant in ${*:-plain address thread}; do
    wrapper=
    case $variant in
        plain) options=${OPTIMIZE:--O2 -g} ;;
        address) options="-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all" ;;
        thread)
            options="-O1 -g -fsanitize=thread"
            # Its place in memory is taken where addresses are random in more bits than it expects.
            if setarch -R true 2> /dev/null; then wrapper="setarch -R"; fi
            ;;
        *) echo "plain, address or thread, not $variant" >&2 && exit 2 ;;
    esac
    echo "== $variant"
    # Built again where one of the sources, the compiler or an option is another.
    key=$({ echo "$compiler" $flags $options; $compiler --version; cat $core/* tests/native/*; } | sha256sum)
    if [ "$key" != "$(cat "$build/$variant.key" 2> /dev/null)" ]; then
        $compiler $flags $options "$build/all.cpp" -o "$build/$variant.$$"
        mv "$build/$variant.$$" "$build/$variant"
        echo "$key" > "$build/$variant.key"
    fi
    ASAN_OPTIONS=halt_on_error=1:detect_leaks=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
        TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1 $wrapper "$build/$variant"
done
