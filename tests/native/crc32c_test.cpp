// The checksum itself: known values, and that its parts add up.

#include "crc32c.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "check.h"

namespace {

using namespace offload;
using check::Random;

std::vector<char> noise(std::size_t nbytes, Random& random) {
    std::vector<char> data(nbytes);
    random.fill(data.data(), nbytes);
    return data;
}

bool all_give(std::uint32_t expected, std::uint32_t before, const void* data, std::size_t nbytes) {
    for (const auto way : crc32c_ways()) {
        if (crc32c_by(way, before, data, nbytes) != expected) return false;
    }
    return crc32c(before, data, nbytes) == expected;
}

bool gives(std::uint32_t expected, const std::vector<unsigned char>& data) {
    return all_give(expected, 0, data.data(), data.size());
}

TEST(crc32c_has_the_values_of_rfc_3720) {
    std::vector<unsigned char> up(32), down(32);
    for (unsigned i = 0; i < 32; ++i) up[i] = down[31 - i] = static_cast<unsigned char>(i);
    CHECK(gives(0x00000000, {}));
    CHECK(gives(0x8A9136AA, std::vector<unsigned char>(32, 0x00)));
    CHECK(gives(0x62A8AB43, std::vector<unsigned char>(32, 0xFF)));
    CHECK(gives(0x46DD794E, up));
    CHECK(gives(0x113FDB5C, down));
    CHECK(gives(0xE3069283, {'1', '2', '3', '4', '5', '6', '7', '8', '9'}));
    std::vector<unsigned char> command(48);  // an iSCSI read
    command[0] = 0x01, command[1] = 0xC0, command[16] = 0x14, command[22] = 0x04;
    command[27] = 0x14, command[31] = 0x18, command[32] = 0x28, command[40] = 0x02;
    CHECK(gives(0xD9963A56, command));
}

TEST(crc32c_is_the_same_in_every_way) {
    for (const auto way : crc32c_ways()) std::printf("  by %s\n", std::string(way).c_str());
    Random random(1);
    const auto data = noise(100'008, random);
    const auto same = [&](std::size_t skew, std::size_t nbytes) {
        const auto before = static_cast<std::uint32_t>(random.below(std::size_t{1} << 32));
        const char* start = data.data() + skew;
        return all_give(crc32c_by("table", before, start, nbytes), before, start, nbytes);
    };
    for (std::size_t skew = 0; skew < 8; ++skew) {
        for (std::size_t nbytes = 0; nbytes <= 1'100; ++nbytes) CHECK(same(skew, nbytes));
    }
    // About the three stretches that the instruction goes over at a time.
    for (const std::size_t stretches : {1, 2, 3, 6}) {
        for (std::size_t beside = 0; beside < 20; ++beside) {
            CHECK(same(random.below(8), stretches * 4096 - 10 + beside));
        }
    }
    for (int turn = 0; turn < 60; ++turn) {
        CHECK(same(random.below(8), random.between(10'000, 100'000)));
    }
}

TEST(crc32c_of_one_bit_is_that_of_its_place) {
    // Whatever is wrong about a factor shows in some bit of some place.
    std::vector<char> data(2'000);
    for (std::size_t bit = 0; bit < 8 * data.size(); bit += 7) {
        data[bit / 8] = static_cast<char>(1 << bit % 8);
        const auto expected = crc32c_by("table", 0, data.data(), data.size());
        CHECK(all_give(expected, 0, data.data(), data.size()));
        data[bit / 8] = 0;
    }
}

TEST(crc32c_goes_on_where_it_stopped) {
    Random random(2);
    const auto data = noise(50'000, random);
    const auto whole = crc32c(0, data.data(), data.size());
    for (int turn = 0; turn < 50; ++turn) {
        const std::size_t cut = random.below(data.size() + 1);
        const auto first = crc32c(0, data.data(), cut);
        CHECK(crc32c(first, data.data() + cut, data.size() - cut) == whole);
    }
}

TEST(crc32c_of_blocks_adds_up_to_that_of_the_whole) {
    Random random(3);
    for (int turn = 0; turn < 200; ++turn) {
        const auto data = noise(random.below(turn < 100 ? 40 : 40'000), random);
        auto sum = crc32c_of_start(data.size());
        for (std::size_t start = 0; start < data.size();) {
            const std::size_t nbytes = random.between(1, data.size() - start);
            const auto raw = crc32c_raw(data.data() + start, nbytes);
            sum ^= crc32c_shifted(raw, data.size() - start - nbytes);
            start += nbytes;
        }
        CHECK(sum == crc32c(0, data.data(), data.size()));
    }
}

TEST(crc32c_of_pages_is_that_of_each_in_every_way) {
    Random random(5);
    for (std::size_t count = 0; count < 9; ++count) {
        const auto data = noise(count * 4096, random);
        std::vector<std::uint32_t> found(count);
        for (const auto way : crc32c_ways()) {
            std::fill(found.begin(), found.end(), 0);
            crc32c_raw_pages_by(way, data.data(), count, found.data());
            for (std::size_t page = 0; page < count; ++page) {
                const auto raw = crc32c_raw(data.data() + page * 4096, 4096);
                CHECK(found[page] == raw);
                CHECK(crc32c_past_page(raw) == crc32c_shifted(raw, 4096));
            }
        }
    }
}

TEST(crc32c_shifted_is_followed_by_zeros) {
    Random random(4);
    for (const std::size_t zeros : {0, 1, 7, 4096, 100'001}) {
        auto data = noise(99, random);
        const auto raw = crc32c_raw(data.data(), data.size());
        data.resize(data.size() + zeros);
        CHECK(crc32c_raw(data.data(), data.size()) == crc32c_shifted(raw, zeros));
    }
    // More than 32 bits of zeros: in two steps as in one.
    const std::size_t far = (std::size_t{1} << 40) + 12'345;
    CHECK(crc32c_shifted(crc32c_shifted(0xDEADBEEF, far), far) ==
          crc32c_shifted(0xDEADBEEF, 2 * far));
}

}  // namespace
