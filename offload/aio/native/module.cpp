// Python's view of the queue: futures own the buffers of what is in flight.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <stdexcept>

#include "crc32c.h"
#include "queue.h"

namespace nb = nanobind;
using offload::Descriptors;
using offload::Operation;
using offload::Request;

namespace {

// How long a wait goes without looking for signals, so that Ctrl-C ends it.
constexpr double kSignalSeconds = 0.05;

// A contiguous buffer, held until this dies. Needs the GIL at both ends.
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

// A request with what it needs alive: buffer and file.
class Flight {
  public:
    Flight(Operation operation, nb::object file, Descriptors descriptors, std::uint64_t offset,
           nb::handle buffer)
        : file_(std::move(file)),
          buffer_(std::make_unique<Buffer>(buffer, operation == Operation::kRead)),
          request_(std::make_shared<Request>(operation, descriptors, offset, buffer_->data(),
                                             buffer_->nbytes())) {}

    [[nodiscard]] bool done() const { return request_->done(); }

    [[nodiscard]] const std::shared_ptr<Request>& request() const { return request_; }

    // The errno of the request or 0, or -1 when `seconds` (forever where negative) have passed.
    [[nodiscard]] int wait(double seconds) {
        while (!request_->done()) {
            const double slice = seconds < 0 ? kSignalSeconds : std::min(seconds, kSignalSeconds);
            bool finished;
            {
                nb::gil_scoped_release release;
                finished = request_->wait(slice);
            }
            if (finished) break;
            if (PyErr_CheckSignals() != 0) throw nb::python_error();
            if (seconds >= 0 && (seconds -= slice) <= 0) return -1;
        }
        buffer_.reset();
        return request_->error();
    }

  private:
    nb::object file_;
    std::unique_ptr<Buffer> buffer_;
    std::shared_ptr<Request> request_;
};

// The queue, and references to what is in flight: a future that nobody holds must not free its
// buffer.
class PythonQueue {
  public:
    PythonQueue(unsigned threads, std::size_t block_bytes) : queue_(threads, block_bytes) {}

    nb::object submit(bool write, nb::object file, int direct, int buffered, std::uint64_t offset,
                      nb::handle buffer) {
        while (!flights_.empty() && nb::cast<Flight&>(flights_.front()).done())
            flights_.pop_front();
        const auto operation = write ? Operation::kWrite : Operation::kRead;
        nb::object flight = nb::cast(
            new Flight(operation, std::move(file), Descriptors{direct, buffered}, offset, buffer),
            nb::rv_policy::take_ownership);
        if (!queue_.submit(nb::cast<Flight&>(flight).request())) return nb::none();
        flights_.push_back(flight);
        return flight;
    }

    void close() {
        {
            nb::gil_scoped_release release;
            queue_.close();
        }
        flights_.clear();
    }

    [[nodiscard]] std::uint64_t read_bytes() const { return queue_.read_bytes(); }
    [[nodiscard]] std::uint64_t written_bytes() const { return queue_.written_bytes(); }

  private:
    offload::Queue queue_;
    std::deque<nb::object> flights_;
};

std::uint32_t crc32c(nb::handle data, std::uint32_t value) {
    Buffer buffer(data, false);
    nb::gil_scoped_release release;
    return offload::crc32c(value, buffer.data(), buffer.nbytes());
}

}  // namespace

NB_MODULE(_native, module) {
    // At the end of a process Python does not free everything (a pytest session, an interactive
    // one); what nanobind then reports is no leak of ours.
    nb::set_leak_warnings(false);
    nb::class_<Flight>(module, "Flight").def("done", &Flight::done).def("wait", &Flight::wait);
    nb::class_<PythonQueue>(module, "Queue")
        .def(nb::init<unsigned, std::size_t>())
        .def("submit", &PythonQueue::submit)
        .def("close", &PythonQueue::close)
        .def_prop_ro("read_bytes", &PythonQueue::read_bytes)
        .def_prop_ro("written_bytes", &PythonQueue::written_bytes);
    module.def("crc32c", &crc32c);
}
