#include "request.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <new>

#include "crc32c.h"

namespace offload {
namespace {

// Returns the part of a piece that O_DIRECT can move: [first, second).
//
// O_DIRECT needs offset, address and length to be multiples of a page. Unaligned bytes at either
// end go through the buffered descriptor. So does the whole piece if offset and address differ
// modulo a page. The kernel keeps both descriptors coherent: a direct transfer first writes back
// and drops cached pages.
std::pair<std::size_t, std::size_t> direct_part(const Piece& piece) {
    const auto address = reinterpret_cast<std::uintptr_t>(piece.data);
    const std::pair<std::size_t, std::size_t> none{piece.nbytes, piece.nbytes};
    if (piece.file.direct < 0 || (address - piece.offset) % kPage != 0) return none;
    const std::size_t head = (kPage - piece.offset % kPage) % kPage;
    if (head + kPage > piece.nbytes) return none;
    return {head, head + (piece.nbytes - head) / kPage * kPage};
}

}  // namespace

Request::Request(Operation operation, Priority priority, std::vector<Piece> pieces,
                 Checksum checksum)
    : operation_(operation), priority_(priority), checksum_(checksum), pieces_(std::move(pieces)) {
    for (const auto& piece : pieces_) nbytes_ += piece.nbytes;
    behind_ = nbytes_;
    if (checksum_.wanted) {
        crc_ = crc32c_of_start(nbytes_);
        if (nbytes_ > 0) page_crcs_.assign((end() - 1) / kPage + 1, crc32c_of_start(kPage));
        for (const std::size_t page : {std::size_t{0}, page_crcs_.size() - 1}) {
            if (nbytes_ == 0) break;
            const std::size_t start = std::max(first(), page * kPage);
            page_crcs_[page] = crc32c_of_start(std::min(end(), (page + 1) * kPage) - start);
        }
    }
    skip_empty();
    if (!has_block()) compare();
}

void Request::compare() {
    if (error_ == 0 && checksum_.expected && *checksum_.expected != crc_) error_ = EBADMSG;
}

void Request::skip_empty() {
    while (piece_ < pieces_.size() && start_ == pieces_[piece_].nbytes) {
        ++piece_;
        start_ = 0;
    }
}

bool Request::wait(double seconds) {
    if (done()) return true;
    std::unique_lock lock(mutex_);
    return finished_.wait_for(lock, std::chrono::duration<double>(seconds),
                              [this] { return done(); });
}

void Request::finish() {
    // Under the lock: otherwise a waiter between its check and its sleep would miss the wake-up.
    std::lock_guard lock(mutex_);
    done_.store(true, std::memory_order_release);
    finished_.notify_all();
}

Block Request::next_block(std::size_t block_bytes) {
    const Piece& piece = pieces_[piece_];
    const auto [first, last] = direct_part(piece);
    const bool direct = start_ >= first && start_ < last;
    const std::size_t limit = start_ < first ? first : direct ? last : piece.nbytes;
    const std::size_t nbytes = std::min(block_bytes, limit - start_);
    char* data = piece.data + start_;
    const std::size_t at = end() - behind_;
    behind_ -= nbytes;
    Block block{nullptr,
                {operation_, direct ? piece.file.direct : piece.file.buffered,
                 piece.offset + start_, data, nbytes},
                data,
                nbytes,
                piece_,
                behind_,
                at,
                piece.file.buffered};
    start_ += nbytes;
    ++cut_;
    skip_empty();
    return block;
}

bool Request::settle(const Block& block) {
    if (block.error != 0 && error_ == 0) {
        error_ = block.error;
        failed_piece_ = block.piece;
        piece_ = pieces_.size();
    }
    if (checksum_.wanted && block.error == 0) {
        crc_ ^= crc32c_shifted(block.crc, block.behind);
        std::size_t page = block.at / kPage;
        const std::size_t last = block.at + block.nbytes;
        for (const std::uint32_t remainder : block.pages) {
            // Only the last page of a block may go on behind it.
            const std::size_t stop = std::min(end(), (page + 1) * kPage);
            page_crcs_[page++] ^= stop > last ? crc32c_shifted(remainder, stop - last) : remainder;
        }
    }
    if (--cut_ > 0 || has_block()) return false;
    compare();
    return true;
}

void sum(Block& block) {
    const std::size_t first = block.at % kPage;
    const std::size_t head = std::min(first == 0 ? 0 : kPage - first, block.nbytes);
    const std::size_t whole = (block.nbytes - head) / kPage;
    const std::size_t tail = block.nbytes - head - whole * kPage;
    const char* data = block.data;
    block.crc = 0;
    try {
        block.pages.resize((head > 0) + whole + (tail > 0));
    } catch (const std::bad_alloc&) {
        block.error = ENOMEM;  // of this request alone
        return;
    }
    std::uint32_t* remainders = block.pages.data();
    if (head > 0) {
        block.crc = *remainders++ = crc32c_raw(data, head);
        data += head;
    }
    crc32c_raw_pages(data, whole, remainders);
    for (std::size_t page = 0; page < whole; ++page) {
        block.crc = crc32c_past_page(block.crc) ^ *remainders++;
    }
    if (tail > 0) {
        *remainders = crc32c_raw(data + whole * kPage, tail);
        block.crc = crc32c_shifted(block.crc, tail) ^ *remainders;
    }
}

Next advance(Block& block, long result) {
    auto& left = block.left;
    if (result > 0) {
        const auto moved = static_cast<std::size_t>(result);
        left.offset += moved;
        left.data += moved;
        left.nbytes -= moved;
        if (left.nbytes == 0) return Next::kDone;
        // A direct transfer that stopped within a page cannot continue with O_DIRECT.
        if (moved % kPage != 0) left.descriptor = block.buffered;
        return Next::kAgain;
    }
    const int error = result < 0 ? static_cast<int>(-result)
                                 : (left.operation == Operation::kRead ? ENODATA : EIO);
    if (error == EINTR) return Next::kAgain;
    if (error == EAGAIN) return Next::kLater;
    if (error == EINVAL && left.descriptor != block.buffered) {
        left.descriptor = block.buffered;  // a file system that needs coarser alignment than pages
        return Next::kAgain;
    }
    block.error = error;
    return Next::kFailed;
}

}  // namespace offload
