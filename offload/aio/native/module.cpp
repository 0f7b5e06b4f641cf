// The Python module of the queue. Flights own the buffers of requests that are in flight.
//
// No function takes or returns a std::vector or a std::string: see [Note: arguments without memory]
// in kernels/native/module.cpp.

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string_view.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <deque>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "backend.h"
#include "crc32c.h"
#include "queue.h"

namespace nb = nanobind;
using offload::Checksum;
using offload::Kind;
using offload::Operation;
using offload::Piece;
using offload::Priority;
using offload::Request;

namespace {

// Seconds between checks for signals during a wait, so that Ctrl-C ends the wait.
constexpr double kSignalSeconds = 0.05;

// [Note: Exit] An interpreter that is ending kills a daemon thread that takes the GIL, by an
// unwinding to which C++ responds with abort(). At that moment no thread may be between releasing
// and retaking the GIL: `settle` waits for such threads, and from then on no thread releases it.
std::atomic<int> without_gil{0};
std::atomic<bool> settled{false};

// Releases the GIL for the lifetime of the object.
class Unlocked {
  public:
    Unlocked() {
        if (settled) return;
        ++without_gil;
        state_ = PyEval_SaveThread();
    }
    ~Unlocked() {
        if (state_ == nullptr) return;
        PyEval_RestoreThread(state_);
        --without_gil;
    }
    Unlocked(const Unlocked&) = delete;
    Unlocked& operator=(const Unlocked&) = delete;

  private:
    PyThreadState* state_ = nullptr;
};

// A forked child contains this process's objects but none of its threads.
void forget_threads() { without_gil = 0; }

// Called after every queue is closed, so that no thread waits for long. See [Note: Exit].
void settle() {
    settled = true;
    nb::gil_scoped_release release;
    while (without_gil > 0) std::this_thread::sleep_for(std::chrono::microseconds(100));
}

// A contiguous buffer, held for the lifetime of the object. Both ends need the GIL.
class Buffer {
  public:
    Buffer(nb::handle object, bool writable) {
        const int flags = writable ? PyBUF_CONTIG : PyBUF_CONTIG_RO;
        if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) throw nb::python_error();
    }
    ~Buffer() { PyBuffer_Release(&view_); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    [[nodiscard]] char* data() const { return static_cast<char*>(view_.buf); }
    [[nodiscard]] std::size_t nbytes() const { return static_cast<std::size_t>(view_.len); }

  private:
    Py_buffer view_;
};

// A request, with the objects that must outlive it: the buffer and the descriptors' owners.
class Flight {
  public:
    Flight(Operation operation, Priority priority, nb::handle pieces, nb::handle buffer,
           Checksum checksum)
        : pid_(getpid()),
          owners_(nb::borrow(pieces)),
          buffer_(std::make_unique<Buffer>(buffer, operation == Operation::kRead)),
          request_(
              std::make_shared<Request>(operation, priority, native(pieces, *buffer_), checksum)) {}

    ~Flight() {
        // Destroying a condition variable waits for its waiters, which exist in the parent only.
        if (getpid() != pid_) (void)new std::shared_ptr<Request>(std::move(request_));
    }

    Flight(const Flight&) = delete;
    Flight& operator=(const Flight&) = delete;

    // Returns true, and releases the buffer to its owner, once the request has ended.
    [[nodiscard]] bool done() {
        if (!request_->done()) return false;
        release();
        return true;
    }
    [[nodiscard]] std::size_t failed_piece() const { return request_->failed_piece(); }
    [[nodiscard]] std::uint32_t crc() const { return request_->crc(); }
    // The CRC-32C of each page, as uint32 in the machine's order.
    [[nodiscard]] nb::bytes page_crcs() const {
        const auto& all = request_->page_crcs();
        return nb::bytes(reinterpret_cast<const char*>(all.data()), all.size() * sizeof(all[0]));
    }

    [[nodiscard]] const std::shared_ptr<Request>& request() const { return request_; }

    // Returns the errno of the request or 0, or -1 after `seconds` (negative: no limit).
    [[nodiscard]] int wait(double seconds) {
        const auto start = std::chrono::steady_clock::now();
        double left = seconds;
        while (!request_->done()) {
            bool finished;
            {
                Unlocked unlocked;
                finished = request_->wait(seconds < 0 ? kSignalSeconds
                                                      : std::clamp(left, 0.0, kSignalSeconds));
            }
            if (finished) break;
            if (PyErr_CheckSignals() != 0) throw nb::python_error();
            const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - start;
            left = seconds - passed.count();
            if (seconds >= 0 && left <= 0) return -1;
        }
        release();
        return request_->error();
    }

  private:
    void release() {
        // Moved out first: their destruction runs other code, which may reenter this flight.
        const auto buffer = std::move(buffer_);
        const auto owners = std::move(owners_);
    }

    // `pieces`: (owner of the descriptors, direct, buffered, offset, nbytes) of each range; the
    // ranges are adjacent in memory.
    static std::vector<Piece> native(nb::handle pieces, const Buffer& buffer) {
        std::vector<Piece> all;
        char* data = buffer.data();
        for (nb::handle piece : pieces) {
            const auto nbytes = nb::cast<std::size_t>(piece[4]);
            if (nbytes > static_cast<std::size_t>(buffer.data() + buffer.nbytes() - data)) {
                throw std::out_of_range("more bytes in the pieces than in the buffer");
            }
            all.push_back({{nb::cast<int>(piece[1]), nb::cast<int>(piece[2])},
                           nb::cast<std::uint64_t>(piece[3]),
                           data,
                           nbytes});
            data += nbytes;
        }
        return all;
    }

    const pid_t pid_;
    nb::object owners_;
    std::unique_ptr<Buffer> buffer_;
    std::shared_ptr<Request> request_;
};

template <class Values>
nb::list listed(const Values& values) {
    nb::list all;
    for (const auto& value : values) all.append(value);
    return all;
}

Kind kind_of(std::string_view name) {
    if (name == "io_uring") return Kind::kUring;
    if (name == "libaio") return Kind::kLibaio;
    if (name == "threads") return Kind::kThreads;
    throw std::invalid_argument("no backend " + std::string(name));
}

// The queue, with references to all requests in flight: dropping a future must not free its buffer
// under the kernel.
class PythonQueue {
  public:
    PythonQueue(std::string_view backend, unsigned threads, unsigned depth, std::size_t block_bytes)
        : pid_(getpid()) {
        const Kind kind = kind_of(backend);
        offload::Refused refused{0, ""};
        try {
            Unlocked unlocked;
            queue_ = std::make_unique<offload::Queue>(
                [kind, depth] { return offload::open_backend(kind, depth); }, threads,
                kind == Kind::kThreads ? 1 : depth, block_bytes);
        } catch (const offload::Refused& error) {
            refused = error;
        } catch (const std::system_error& error) {
            refused = {error.code().value(), "pthread_create"};
        }
        if (refused.error == 0) return;
        errno = refused.error;
        PyErr_SetFromErrnoWithFilename(PyExc_OSError, refused.call.c_str());
        throw nb::python_error();
    }

    ~PythonQueue() {
        // A forked child contains no threads to join, and cannot destroy a condition variable on
        // which threads of the parent wait.
        if (getpid() == pid_) {
            close();
        } else {
            (void)queue_.release();
        }
    }

    PythonQueue(const PythonQueue&) = delete;
    PythonQueue& operator=(const PythonQueue&) = delete;

    nb::object submit(bool write, unsigned priority, nb::handle pieces, nb::handle buffer,
                      bool checksum, std::optional<std::uint32_t> expected) {
        while (!flights_.empty() && nb::cast<Flight&>(flights_.front()).request()->done()) {
            // Out of the deque before destruction: releasing a buffer may release the GIL (munmap
            // does), and another thread then enters this loop.
            const nb::object ended = std::move(flights_.front());
            flights_.pop_front();
        }
        nb::object flight =
            nb::cast(new Flight(write ? Operation::kWrite : Operation::kRead,
                                static_cast<Priority>(std::min(priority, kLast)), pieces, buffer,
                                Checksum{checksum || expected.has_value(), expected}),
                     nb::rv_policy::take_ownership);
        flights_.push_back(flight);
        bool submitted = false;
        try {
            submitted = queue_->submit(nb::cast<Flight&>(flight).request());
        } catch (...) {
            flights_.pop_back();  // it would never be done
            throw;
        }
        if (submitted) return flight;
        flights_.pop_back();
        return nb::none();
    }

    [[nodiscard]] bool announce(Flight& flight, std::uint64_t tag) {
        return queue_->announce(*flight.request(), tag);
    }

    [[nodiscard]] nb::list announced() {
        if (tags_.empty()) {
            Unlocked unlocked;
            tags_ = queue_->announced();
        }
        // Dropped once the list exists: where it finds no memory, the next call returns them.
        nb::list all = listed(tags_);
        tags_.clear();
        return all;
    }

    std::size_t register_memory(nb::handle memory) {
        auto& buffer = *registered_.emplace_back(std::make_unique<Buffer>(memory, true));
        Unlocked unlocked;
        return queue_->register_memory(buffer.data(), buffer.nbytes());
    }

    bool register_file(nb::object owner, int descriptor) {
        owners_.push_back(std::move(owner));
        Unlocked unlocked;
        return queue_->register_file(descriptor);
    }

    void close() {
        {
            Unlocked unlocked;
            queue_->close();
        }
        // One by one: a deque that is emptied by a move allocates, which a destructor may not.
        while (!flights_.empty()) {
            const nb::object ended = std::move(flights_.front());
            flights_.pop_front();
        }
        const auto registered = std::exchange(registered_, {});
        const auto owners = std::exchange(owners_, {});
    }

    [[nodiscard]] std::uint64_t moved_bytes(bool write) const {
        return queue_->moved_bytes(write ? Operation::kWrite : Operation::kRead);
    }
    [[nodiscard]] double latency(bool write, double fraction) const {
        return queue_->latency(write ? Operation::kWrite : Operation::kRead, fraction);
    }

  private:
    static constexpr unsigned kLast = offload::kPriorities - 1;

    const pid_t pid_;
    std::unique_ptr<offload::Queue> queue_;
    std::deque<nb::object> flights_;
    std::vector<std::unique_ptr<Buffer>> registered_;
    std::vector<nb::object> owners_;
    std::vector<std::uint64_t> tags_;  // of the callback thread, which alone asks for them
};

std::uint32_t crc32c(nb::handle data, std::uint32_t value) {
    Buffer buffer(data, false);
    Unlocked unlocked;
    return offload::crc32c(value, buffer.data(), buffer.nbytes());
}

std::uint32_t crc32c_joined(std::uint32_t first, std::uint32_t second, std::size_t second_nbytes) {
    return offload::crc32c_shifted(first, second_nbytes) ^ second;
}

std::uint32_t crc32c_by(std::string_view way, nb::handle data, std::uint32_t value) {
    Buffer buffer(data, false);
    return offload::crc32c_by(way, value, buffer.data(), buffer.nbytes());
}

}  // namespace

NB_MODULE(_native, module) {
    // At exit Python does not free everything (a pytest session, an engine that a script did not
    // destroy). nanobind would report these objects as leaks.
    nb::set_leak_warnings(false);
    nb::class_<Flight>(module, "Flight")
        .def("done", &Flight::done)
        .def("wait", &Flight::wait)
        .def_prop_ro("failed_piece", &Flight::failed_piece)
        .def_prop_ro("crc", &Flight::crc)
        .def_prop_ro("page_crcs", &Flight::page_crcs);
    nb::class_<PythonQueue>(module, "Queue")
        .def(nb::init<std::string_view, unsigned, unsigned, std::size_t>())
        .def("submit", &PythonQueue::submit, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
             nb::arg().none())
        .def("announce", &PythonQueue::announce)
        .def("announced", &PythonQueue::announced)
        .def("register_memory", &PythonQueue::register_memory)
        .def("register_file", &PythonQueue::register_file)
        .def("close", &PythonQueue::close)
        .def("moved_bytes", &PythonQueue::moved_bytes)
        .def("latency", &PythonQueue::latency);
    module.def("crc32c_ways", [] { return listed(offload::crc32c_ways()); });
    module.def("crc32c_joined", &crc32c_joined);
    module.def("crc32c_of_zeros", &offload::crc32c_of_start);
    module.def("crc32c", &crc32c);
    module.def("crc32c_by", &crc32c_by);
    pthread_atfork(nullptr, nullptr, &forget_threads);
    // Exit handlers run in reverse order, so this one runs after that of the queues, which is
    // registered later.
    nb::module_::import_("atexit").attr("register")(nb::cpp_function(&settle));
}
