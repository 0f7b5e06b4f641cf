// Work for a queue: threads that read and write random parts of one file, and know what must be
// there.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "check.h"
#include "crc32c.h"
#include "queue.h"

namespace storm {

using namespace offload;
using check::Random;

// Memory at a page's start.
class Memory {
  public:
    explicit Memory(std::size_t nbytes)
        : nbytes_((nbytes + kPage - 1) / kPage * kPage),
          data_(static_cast<char*>(std::aligned_alloc(kPage, nbytes_)), &std::free) {
        std::memset(data_.get(), 0, nbytes_);
    }
    [[nodiscard]] char* data() const { return data_.get(); }
    [[nodiscard]] std::size_t size() const { return nbytes_; }

  private:
    std::size_t nbytes_;
    std::unique_ptr<char, void (*)(void*)> data_;
};

inline void wait(Request& request) { CHECK(request.wait(120) && request.done()); }

// Bytes of a file that cannot be moved: [first, last).
struct Bad {
    std::uint64_t first = 0, last = 0;
    [[nodiscard]] bool touches(std::uint64_t offset, std::size_t nbytes) const {
        return nbytes > 0 && offset < last && offset + nbytes > first;
    }
};

struct Plan {
    Descriptors file;
    std::uint64_t seed = 0;
    unsigned threads = 3;
    unsigned rounds = 10;
    std::size_t part = 200'001;  // each thread's own bytes of the file
    std::size_t cuts = 40;       // pieces that a part is cut into in one round
    Bad bad;
    const char* disk = nullptr;  // the file's bytes, where it has bad ones
};

class Storm {
  public:
    explicit Storm(const Plan& plan) : plan_(plan) {
        for (unsigned i = 0; i < plan.threads; ++i) {
            models_.emplace_back(plan.part);
            memory_.emplace_back(plan.part + 3 * (plan.cuts + 1) * kPage);
        }
    }

    void rage(Queue& queue) {
        std::vector<std::thread> threads;
        for (unsigned i = 0; i < plan_.threads; ++i) {
            threads.emplace_back([this, &queue, i] {
                Random random(1000 * plan_.seed + i);
                for (unsigned turn = 0; turn < plan_.rounds; ++turn) round(queue, i, random);
            });
        }
        for (auto& thread : threads) thread.join();
    }

    // Whether a file's bytes are what was written.
    [[nodiscard]] bool fits(const char* file) const {
        for (unsigned i = 0; i < plan_.threads; ++i) {
            if (std::memcmp(file + i * plan_.part, models_[i].data(), plan_.part) != 0)
                return false;
        }
        return true;
    }

    [[nodiscard]] std::size_t file_bytes() const { return plan_.threads * plan_.part; }
    [[nodiscard]] const std::vector<Memory>& memory() const { return memory_; }
    [[nodiscard]] std::uint64_t asked_bytes(Operation operation) const {
        return asked_bytes_[static_cast<std::size_t>(operation)];
    }
    [[nodiscard]] unsigned failed() const { return failed_; }
    // Tags of the requests that the queue said it would announce.
    [[nodiscard]] std::vector<std::uint64_t> tags() const { return tags_; }

  private:
    struct Asked {
        std::shared_ptr<Request> request;
        std::vector<Piece> pieces;
        std::optional<std::uint32_t> expected;
    };

    // The piece's place in what its thread knows.
    [[nodiscard]] char* model(unsigned i, const Piece& piece) {
        return models_[i].data() + (piece.offset - i * plan_.part);
    }

    [[nodiscard]] std::uint32_t crc_of(const std::vector<Piece>& pieces) const {
        std::uint32_t crc = 0;
        for (const auto& piece : pieces) crc = crc32c(crc, piece.data, piece.nbytes);
        return crc;
    }

    // Cuts the whole part into pieces, so that no two requests that are on their way share a byte.
    void round(Queue& queue, unsigned i, Random& random) {
        std::vector<std::size_t> cuts{0, plan_.part};
        while (cuts.size() < plan_.cuts) {
            const std::size_t cut = random.below(plan_.part + 1);
            cuts.push_back(random.one_in(3) ? cut / kPage * kPage : cut);
        }
        std::sort(cuts.begin(), cuts.end());
        std::vector<Piece> pieces;
        char* free = memory_[i].data();
        for (std::size_t k = 0; k + 1 < cuts.size(); ++k) {
            const std::uint64_t offset = i * plan_.part + cuts[k];
            const std::size_t skew = random.one_in(3) ? random.below(kPage) : offset % kPage;
            pieces.push_back({plan_.file, offset, free + skew, cuts[k + 1] - cuts[k]});
            free += (skew + pieces.back().nbytes + kPage - 1) / kPage * kPage;
            CHECK(free <= memory_[i].data() + memory_[i].size());
        }
        for (std::size_t k = pieces.size(); k > 1; --k) {
            std::swap(pieces[k - 1], pieces[random.below(k)]);
        }
        std::vector<Asked> all;
        while (!pieces.empty()) {
            std::vector<Piece> some;
            for (std::size_t n = random.between(1, 4); n > 0 && !pieces.empty(); --n) {
                some.push_back(pieces.back());
                pieces.pop_back();
            }
            all.push_back(ask(queue, i, std::move(some), random));
        }
        for (auto& asked : all) look(i, asked);
    }

    Asked ask(Queue& queue, unsigned i, std::vector<Piece> pieces, Random& random) {
        const auto operation = random.one_in(2) ? Operation::kRead : Operation::kWrite;
        const auto priority = static_cast<Priority>(random.below(kPriorities));
        Asked asked{nullptr, std::move(pieces), {}};
        std::uint32_t crc = 0;
        for (const auto& piece : asked.pieces) {
            random.fill(piece.data, piece.nbytes);  // what a read is to replace
            if (operation == Operation::kWrite) {
                std::memcpy(model(i, piece), piece.data, piece.nbytes);
            }
            crc = crc32c(crc, model(i, piece), piece.nbytes);
            asked_bytes_[static_cast<std::size_t>(operation)] += piece.nbytes;
        }
        Checksum checksum{random.one_in(2), {}};
        if (checksum.wanted && random.one_in(2)) {
            checksum.expected = random.one_in(4) ? crc + 1 : crc;
            asked.expected = checksum.expected;
        }
        asked.request = std::make_shared<Request>(operation, priority, asked.pieces, checksum);
        CHECK(queue.submit(asked.request));
        const std::uint64_t tag = ++next_tag_;
        if (random.one_in(2) && queue.announce(*asked.request, tag)) {
            const std::lock_guard lock(mutex_);
            tags_.push_back(tag);
        }
        return asked;
    }

    void look(unsigned i, const Asked& asked) {
        Request& request = *asked.request;
        wait(request);
        const auto touched = [&](const Piece& piece) {
            return plan_.bad.touches(piece.offset, piece.nbytes);
        };
        const auto& pieces = asked.pieces;
        if (std::any_of(pieces.begin(), pieces.end(), touched)) {
            CHECK(request.error() == EIO && touched(pieces[request.failed_piece()]));
            ++failed_;
            // Some of what was to be written is there.
            for (const auto& piece : pieces) {
                std::memcpy(model(i, piece), plan_.disk + piece.offset, piece.nbytes);
            }
            return;
        }
        std::size_t nbytes = 0;
        for (const auto& piece : pieces) {
            CHECK(std::memcmp(model(i, piece), piece.data, piece.nbytes) == 0);
            nbytes += piece.nbytes;
        }
        if (nbytes == 0) return;  // no block, no look at its checksum
        const bool differs = asked.expected && *asked.expected != crc_of(pieces);
        CHECK(request.error() == (differs ? EBADMSG : 0));
        if (request.wants_crc()) CHECK(request.crc() == crc_of(pieces));
    }

    const Plan plan_;
    std::vector<std::vector<char>> models_;  // what each thread knows to be in its part
    std::vector<Memory> memory_;
    std::array<std::atomic<std::uint64_t>, 2> asked_bytes_{};
    std::atomic<std::uint64_t> next_tag_{0};
    std::atomic<unsigned> failed_{0};
    std::mutex mutex_;
    std::vector<std::uint64_t> tags_;
};

}  // namespace storm
