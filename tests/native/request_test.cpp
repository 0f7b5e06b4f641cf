// How a request is cut into blocks, and what becomes of a block after each system call.

#include "request.h"

#include <algorithm>
#include <cerrno>
#include <memory>
#include <utility>
#include <vector>

#include "check.h"
#include "crc32c.h"

namespace {

using namespace offload;
using check::Random;

constexpr int kDirect = 7;
constexpr int kBuffered = 8;

// Memory that is only counted with, never touched.
char* place(std::uintptr_t address) { return reinterpret_cast<char*>(address); }

Piece piece(std::uint64_t offset, char* data, std::size_t nbytes, int direct = kDirect) {
    return {{direct, kBuffered}, offset, data, nbytes};
}

bool direct_fits(const Transfer& transfer) {
    const auto address = reinterpret_cast<std::uintptr_t>(transfer.data);
    return (address | transfer.offset | transfer.nbytes) % kPage == 0;
}

Block first_block(Operation operation, std::size_t nbytes, int direct = kDirect) {
    Request request(operation, Priority::kNormal, {piece(0, place(1 << 30), nbytes, direct)}, {});
    return request.next_block(std::size_t{1} << 40);
}

TEST(request_is_cut_so_that_each_byte_is_in_one_block) {
    for (std::uint64_t seed = 0; seed < 400; ++seed) {
        Random random(seed);
        const auto size = [&] {
            const std::size_t pages = random.below(9) * kPage;
            return random.one_in(3) ? pages : pages + random.below(kPage);
        };
        std::vector<Piece> pieces;
        std::size_t total = 0;
        for (std::size_t count = random.between(0, 6); count > 0; --count) {
            const std::uint64_t offset = (std::uint64_t{random.below(5)} << 32) + size();
            const std::uintptr_t skew = random.one_in(2) ? offset % kPage : random.below(kPage);
            const std::size_t nbytes = random.one_in(5) ? 0 : size();
            char* data = place(((pieces.size() + 1) << 30) + skew);
            pieces.push_back(piece(offset, data, nbytes, random.one_in(4) ? -1 : kDirect));
            total += nbytes;
        }
        const std::size_t block_bytes = random.between(1, 4) * kPage;
        Request request(Operation::kRead, Priority::kNormal, pieces, {});
        std::size_t at = 0, start = 0, done = 0, cut = 0;  // blocks come in order
        while (request.has_block()) {
            const Block block = request.next_block(block_bytes);
            const Transfer& left = block.left;
            while (start == pieces[at].nbytes) ++at, start = 0;
            CHECK(block.piece == at && left.operation == Operation::kRead);
            CHECK(left.offset == pieces[at].offset + start && left.data == pieces[at].data + start);
            CHECK(block.data == left.data && block.nbytes == left.nbytes);
            CHECK(left.nbytes > 0 && left.nbytes <= block_bytes);
            CHECK(left.nbytes <= pieces[at].nbytes - start);
            CHECK(block.buffered == kBuffered);
            if (left.descriptor != kBuffered) {
                CHECK(left.descriptor == pieces[at].file.direct && direct_fits(left));
            } else if (pieces[at].file.direct >= 0 && left.nbytes >= 2 * kPage) {
                // Only what does not fit goes through the cache: less than a page at either end.
                CHECK((reinterpret_cast<std::uintptr_t>(left.data) - left.offset) % kPage != 0);
            }
            start += left.nbytes;
            done += left.nbytes;
            ++cut;
            CHECK(block.behind == total - done);
        }
        CHECK(done == total);
        CHECK((cut == 0) == (total == 0));
    }
}

TEST(request_moves_all_that_fits_directly) {
    const auto bytes_by = [](const Piece& all, int descriptor) {
        Request request(Operation::kWrite, Priority::kNormal, {all}, {});
        std::size_t nbytes = 0;
        while (request.has_block()) {
            const Block block = request.next_block(4 * kPage);
            if (block.left.descriptor == descriptor) nbytes += block.nbytes;
        }
        return nbytes;
    };
    char* page = place(1 << 30);
    CHECK(bytes_by(piece(0, page, 10 * kPage), kDirect) == 10 * kPage);
    CHECK(bytes_by(piece(100, page + 100, 10 * kPage), kDirect) == 9 * kPage);
    CHECK(bytes_by(piece(kPage, page, kPage + 1), kDirect) == kPage);
    CHECK(bytes_by(piece(1, page + 1, 2 * kPage - 2), kDirect) == 0);
    CHECK(bytes_by(piece(0, page + 512, 10 * kPage), kDirect) == 0);
    CHECK(bytes_by(piece(0, page, 10 * kPage, -1), kBuffered) == 10 * kPage);
}

TEST(request_of_nothing_has_no_block) {
    const std::vector<std::vector<Piece>> nothings{
        {}, {piece(0, nullptr, 0)}, {piece(5, place(1), 0), piece(0, nullptr, 0)}};
    for (const auto& pieces : nothings) {
        const Request request(Operation::kRead, Priority::kUrgent, pieces, {true, {}});
        CHECK(!request.has_block() && request.crc() == 0);
    }
}

TEST(advance_goes_on_after_a_short_transfer) {
    for (std::uint64_t seed = 0; seed < 200; ++seed) {
        Random random(seed);
        const std::size_t nbytes = random.between(1, 20) * kPage;
        Block block = first_block(seed % 2 ? Operation::kRead : Operation::kWrite, nbytes);
        bool within_a_page = false;
        for (std::size_t done = 0; done < nbytes;) {
            CHECK(block.left.offset == done && block.left.data == block.data + done);
            CHECK(block.left.nbytes == nbytes - done);
            CHECK(block.left.descriptor == (within_a_page ? kBuffered : kDirect));
            CHECK(within_a_page || direct_fits(block.left));
            std::size_t moved = random.between(1, nbytes - done);
            if (random.one_in(2)) moved = std::max(moved / kPage * kPage, std::size_t{1});
            if (moved > nbytes - done) moved = nbytes - done;
            done += moved;
            within_a_page |= moved % kPage != 0;
            const Next next = advance(block, static_cast<long>(moved));
            CHECK(next == (done == nbytes ? Next::kDone : Next::kAgain));
        }
        CHECK(block.left.nbytes == 0 && block.error == 0);
        CHECK(block.nbytes == nbytes);
    }
}

TEST(advance_counts_beyond_32_bits) {
    const std::size_t nbytes = std::size_t{9} << 30;
    Block block = first_block(Operation::kRead, nbytes);
    CHECK(block.nbytes == nbytes);
    std::size_t done = 0;
    for (const std::size_t pages : {3 << 18, (4 << 18) + 1}) {  // beyond 31 bits, and beyond 32
        done += pages * kPage;
        CHECK(advance(block, static_cast<long>(pages * kPage)) == Next::kAgain);
        CHECK(block.left.offset == done && block.left.data == block.data + done);
        CHECK(block.left.nbytes == nbytes - done && block.left.descriptor == kDirect);
    }
    CHECK(advance(block, static_cast<long>(block.left.nbytes)) == Next::kDone);
}

TEST(advance_tries_again_what_was_interrupted) {
    Block block = first_block(Operation::kRead, 2 * kPage);
    CHECK(advance(block, -EINTR) == Next::kAgain);
    CHECK(advance(block, -EAGAIN) == Next::kLater);
    CHECK(block.left.nbytes == 2 * kPage && block.left.descriptor == kDirect && block.error == 0);
    CHECK(advance(block, 2 * kPage) == Next::kDone);
}

TEST(advance_falls_back_where_direct_is_refused) {
    Block block = first_block(Operation::kWrite, 2 * kPage);
    CHECK(advance(block, kPage) == Next::kAgain);
    CHECK(advance(block, -EINVAL) == Next::kAgain);
    CHECK(block.left.descriptor == kBuffered && block.left.offset == kPage);
    CHECK(block.left.nbytes == kPage && block.error == 0);
    CHECK(advance(block, -EINVAL) == Next::kFailed);  // that was no question of alignment
    CHECK(block.error == EINVAL);
}

TEST(advance_says_what_failed) {
    const struct {
        Operation operation;
        long result;
        int error;
    } cases[] = {{Operation::kRead, 0, ENODATA},      {Operation::kWrite, 0, EIO},
                 {Operation::kRead, -EIO, EIO},       {Operation::kWrite, -ENOSPC, ENOSPC},
                 {Operation::kRead, -ENOMEM, ENOMEM}, {Operation::kWrite, -EBADF, EBADF}};
    for (const auto& [operation, result, error] : cases) {
        for (const int direct : {kDirect, -1}) {
            Block block = first_block(operation, kPage, direct);
            CHECK(advance(block, result) == Next::kFailed);
            CHECK(block.error == error);
        }
    }
}

// Cuts a request over real bytes and settles its blocks in random order.
void settle_all(Request& request, Random& random) {
    std::vector<Block> blocks;
    while (request.has_block() || !blocks.empty()) {
        if (request.has_block() && (blocks.empty() || random.one_in(2))) {
            blocks.push_back(request.next_block(kPage));
            sum(blocks.back());
            continue;
        }
        std::swap(blocks[random.below(blocks.size())], blocks.back());
        const bool last = blocks.size() == 1 && !request.has_block();
        CHECK(request.settle(blocks.back()) == last);
        blocks.pop_back();
    }
}

TEST(request_adds_up_its_checksum_in_any_order) {
    for (std::uint64_t seed = 0; seed < 100; ++seed) {
        Random random(seed);
        std::vector<std::vector<char>> memory(random.between(1, 5));
        std::vector<Piece> pieces;
        std::vector<char> whole;
        std::uint32_t expected = 0;
        for (auto& each : memory) {
            each.resize(random.one_in(5) ? 0 : random.below(5 * kPage));
            random.fill(each.data(), each.size());
            pieces.push_back(piece(random.below(kPage), each.data(), each.size(), -1));
            expected = crc32c(expected, each.data(), each.size());
            whole.insert(whole.end(), each.begin(), each.end());
        }
        Request plain(Operation::kRead, Priority::kNormal, pieces, {true, {}});
        if (!plain.has_block()) continue;
        settle_all(plain, random);
        CHECK(plain.error() == 0 && plain.crc() == expected);
        std::size_t start = 0, stop = kPage - pieces[0].offset % kPage;
        for (const std::uint32_t page : plain.page_crcs()) {
            stop = std::min(stop, whole.size());
            CHECK(page == crc32c(0, whole.data() + start, stop - start));
            start = std::exchange(stop, stop + kPage);
        }
        CHECK(start == whole.size());
        Request right(Operation::kRead, Priority::kNormal, pieces, {true, expected});
        settle_all(right, random);
        CHECK(right.error() == 0);
        const std::uint32_t other = expected ^ (1u << random.below(32));
        Request wrong(Operation::kRead, Priority::kNormal, pieces, {true, other});
        settle_all(wrong, random);
        CHECK(wrong.error() == EBADMSG);
    }
}

TEST(request_keeps_its_first_error) {
    char* data = place(1 << 30);
    const std::vector<Piece> pieces{piece(0, data, kPage), piece(kPage, data, kPage),
                                    piece(2 * kPage, data, kPage)};
    // With a checksum that differs too: what failed first is said.
    Request request(Operation::kRead, Priority::kNormal, pieces, {true, 1});
    Block first = request.next_block(kPage), second = request.next_block(kPage);
    second.error = ENODATA;
    CHECK(!request.settle(second) && !request.has_block());
    first.error = EIO;
    CHECK(request.settle(first));
    CHECK(request.error() == ENODATA && request.failed_piece() == 1);
}

TEST(request_waits_no_longer_than_asked) {
    Request request(Operation::kRead, Priority::kNormal, {piece(0, place(1 << 30), 1)}, {});
    CHECK(!request.wait(0) && !request.wait(0.001) && !request.done());
    request.finish();
    CHECK(request.done() && request.wait(0) && request.wait(1000));
}

}  // namespace
