// The part of the kernel's io_uring interface that is used here, so that a build needs no recent
// headers. The layout is fixed for ever: io_uring(7), include/uapi/linux/io_uring.h.
#pragma once

#include <cstdint>

namespace offload::uring {

// The same numbers on every architecture with these calls, except Alpha.
constexpr long kSetupCall = 425;
constexpr long kEnterCall = 426;
constexpr long kRegisterCall = 427;

constexpr std::uint32_t kSetupClamp = 1u << 4;
constexpr std::uint32_t kSetupSingleIssuer = 1u << 12;  // Linux 6.0
constexpr std::uint32_t kSetupDeferTaskrun = 1u << 13;  // Linux 6.1
constexpr std::uint32_t kEnterGetEvents = 1u << 0;
constexpr std::uint8_t kFixedFile = 1u << 0;

enum Opcode : std::uint8_t { kReadFixed = 4, kWriteFixed = 5, kRead = 22, kWrite = 23 };

enum Register : unsigned {
    kProbe = 8,
    kFiles2 = 13,
    kFilesUpdate2 = 14,
    kBuffers2 = 15,
    kBuffersUpdate = 16,
};
constexpr std::uint32_t kSparse = 1u << 0;  // Linux 5.19

constexpr std::uint64_t kRings = 0;
constexpr std::uint64_t kEntries = 0x10000000;

struct Submission {
    std::uint8_t opcode;
    std::uint8_t flags;
    std::uint16_t priority;
    std::int32_t descriptor;
    std::uint64_t offset;
    std::uint64_t address;
    std::uint32_t nbytes;
    std::uint32_t operation_flags;
    std::uint64_t user_data;
    std::uint16_t buffer;
    std::uint16_t personality;
    std::int32_t file;
    std::uint64_t unused[2];
};
static_assert(sizeof(Submission) == 64);

struct Completion {
    std::uint64_t user_data;
    std::int32_t result;
    std::uint32_t flags;
};
static_assert(sizeof(Completion) == 16);

struct SubmissionOffsets {
    std::uint32_t head, tail, mask, entries, flags, dropped, array, unused;
    std::uint64_t user_address;
};

struct CompletionOffsets {
    std::uint32_t head, tail, mask, entries, overflow, completions, flags, unused;
    std::uint64_t user_address;
};

struct Parameters {
    std::uint32_t submissions, completions, flags, poll_cpu, poll_idle, features, workers;
    std::uint32_t unused[3];
    SubmissionOffsets submission;
    CompletionOffsets completion;
};
static_assert(sizeof(Parameters) == 120);

struct ProbeOperation {
    std::uint8_t opcode, unused;
    std::uint16_t flags;  // 1: supported
    std::uint32_t unused2;
};

struct Probe {
    std::uint8_t last, count;
    std::uint16_t unused;
    std::uint32_t unused2[3];
    ProbeOperation operations[64];
};

struct ResourceRegister {
    std::uint32_t count, flags;
    std::uint64_t unused, data, tags;
};
static_assert(sizeof(ResourceRegister) == 32);

struct ResourceUpdate {
    std::uint32_t offset, unused;
    std::uint64_t data, tags;
    std::uint32_t count, unused2;
};
static_assert(sizeof(ResourceUpdate) == 32);

}  // namespace offload::uring
