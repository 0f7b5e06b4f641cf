// The Python module of the kernels. Functions take addresses: the wrappers in offload/kernels have
// checked dtype, length, layout and device, and keep the tensors alive during the call.
//
// [Note: arguments without memory] nanobind converts arguments in functions that may not throw. A
// std::vector or a std::string that finds no memory there would end the process, so functions take
// lists and characters, and the headers of those two are not included.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "blocks.h"
#include "elementwise.h"
#include "isa.h"
#include "moments.h"
#include "numa.h"
#include "team.h"
#include "update.h"

namespace nb = nanobind;

namespace {

using offload::Bf16;
using offload::Buffers;
using offload::Element;
using offload::Fp16;
using offload::Rule;
using offload::Segment;

template <class T>
T* at(std::uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

Element element(int number) { return static_cast<Element>(number); }

template <class Values>
nb::list listed(const Values& values) {
    nb::list all;
    for (const auto& value : values) all.append(value);
    return all;
}

Rule rule(std::string_view name) {
    if (name == "adamw") return offload::adamw;
    if (name == "adagrad") return offload::adagrad;
    if (name == "lion") return offload::lion;
    if (name == "sgd") return offload::sgd;
    if (name == "plain_sgd") return offload::plain_sgd;
    if (name == "lamb") return offload::lamb_move;
    if (name == "probe") return offload::probe;
    throw std::invalid_argument("there is no rule " + std::string(name));
}

// start, stop, settings, the noise (its stream, and the number of `start` in it), and the address
// of a gradient of the segment's own, or 0
using Settings = std::tuple<std::size_t, std::size_t, nb::list,
                            std::pair<std::uint64_t, std::uint64_t>, std::uintptr_t>;

Segment segment(const Settings& given) {
    const auto& [start, stop, settings, noise, grad] = given;
    const auto& [stream, element] = noise;
    Segment made{start, stop, {}, stream, element, at<const void>(grad)};
    const std::size_t count = std::min(settings.size(), offload::kSettings);
    for (std::size_t i = 0; i < count; ++i) made.settings[i] = nb::cast<double>(settings[i]);
    return made;
}

// `weight` and `grad` are (address, element); `beside` may be 0.
Buffers buffers(std::pair<std::uintptr_t, int> weight, std::uintptr_t beside,
                const nb::list& moments, int moment_type, std::uintptr_t scales,
                std::pair<std::uintptr_t, int> grad, std::size_t numel) {
    Buffers made{at<void>(weight.first),     element(weight.second), at<void>(beside),
                 {nullptr, nullptr},         element(moment_type),   at<float>(scales),
                 at<const void>(grad.first), element(grad.second),   numel};
    for (std::size_t i = 0; i < moments.size() && i < 2; ++i)
        made.moments[i] = at<void>(nb::cast<std::uintptr_t>(moments[i]));
    return made;
}

void update(std::string_view name, std::pair<std::uintptr_t, int> weight, std::uintptr_t beside,
            const nb::list& moments, int moment_type, std::uintptr_t scales,
            std::pair<std::uintptr_t, int> grad, std::size_t numel, const nb::list& given,
            int writes) {
    const Rule run = rule(name);
    Buffers arrays = buffers(weight, beside, moments, moment_type, scales, grad, numel);
    arrays.writes = static_cast<offload::Writes>(writes);
    std::vector<Segment> segments;
    segments.reserve(given.size());
    for (const nb::handle each : given) segments.push_back(segment(nb::cast<Settings>(each)));
    const nb::gil_scoped_release no_gil;
    const offload::DefaultRounding rounding;  // scalars are rounded on this thread
    run(arrays, segments);
}

void lamb_moments(std::pair<std::uintptr_t, int> weight, std::uintptr_t beside,
                  const nb::list& moments, int moment_type, std::uintptr_t scales,
                  std::pair<std::uintptr_t, int> grad, std::size_t numel, const Settings& given,
                  std::uintptr_t sums) {
    const Buffers arrays = buffers(weight, beside, moments, moment_type, scales, grad, numel);
    const Segment one = segment(given);
    const nb::gil_scoped_release no_gil;
    const offload::DefaultRounding rounding;
    offload::lamb_moments(arrays, one, at<double>(sums));
}

void split_master(std::uintptr_t master, std::uintptr_t weight, std::uintptr_t residual,
                  std::size_t numel) {
    offload::split_master(at<const float>(master), at<Bf16>(weight), at<std::int16_t>(residual),
                          numel);
}

void join_master(std::uintptr_t weight, std::uintptr_t residual, std::uintptr_t master,
                 std::size_t numel) {
    offload::join_master(at<const Bf16>(weight), at<const std::int16_t>(residual),
                         at<float>(master), numel);
}

void split_bf24(std::uintptr_t master, std::uintptr_t weight, std::uintptr_t residual,
                std::size_t numel,
                const std::optional<std::pair<std::uint64_t, std::uint64_t>>& noise) {
    std::optional<offload::MasterNoise> given;
    if (noise) given = {noise->first, noise->second};
    const nb::gil_scoped_release no_gil;
    offload::split_bf24(at<const float>(master), at<Bf16>(weight), at<std::int8_t>(residual), numel,
                        given);
}

void join_bf24(std::uintptr_t weight, std::uintptr_t residual, std::uintptr_t master,
               std::size_t numel) {
    const nb::gil_scoped_release no_gil;
    offload::join_bf24(at<const Bf16>(weight), at<const std::int8_t>(residual), at<float>(master),
                       numel);
}

// Calls `use` with a pointer of the right type.
template <class Use>
auto with_type(std::uintptr_t address, int number, Use use) {
    switch (element(number)) {
        case Element::kBf16:
            return use(at<Bf16>(address));
        case Element::kFp16:
            return use(at<Fp16>(address));
        case Element::kFloat:
        case Element::kCode:  // never asked for
        case Element::kBf24:
            break;
    }
    return use(at<float>(address));
}

std::vector<double> accumulate(std::uintptr_t out, int out_type, std::uintptr_t grad, int grad_type,
                               std::size_t numel, bool add, std::size_t chunk) {
    return with_type(out, out_type, [&](auto* typed_out) {
        return with_type(grad, grad_type, [&](const auto* typed_grad) {
            return offload::accumulate(typed_out, typed_grad, numel, add, chunk);
        });
    });
}

nb::list accumulated(std::uintptr_t out, int out_type, std::uintptr_t grad, int grad_type,
                     std::size_t numel, bool add, std::size_t chunk) {
    std::vector<double> sums;
    {
        const nb::gil_scoped_release no_gil;
        sums = accumulate(out, out_type, grad, grad_type, numel, add, chunk);
    }
    return listed(sums);
}

nb::list sum_squares(std::uintptr_t values, int type, std::size_t numel, std::size_t chunk) {
    std::vector<double> sums;
    {
        const nb::gil_scoped_release no_gil;
        sums = with_type(values, type, [&](const auto* typed) {
            return offload::sum_squares(typed, numel, chunk);
        });
    }
    return listed(sums);
}

void quantize(int format, std::uintptr_t values, int type, std::uintptr_t blocks,
              std::size_t numel) {
    with_type(values, type, [&](const auto* typed) {
        offload::quantize(static_cast<offload::Format>(format), typed, at<std::uint8_t>(blocks),
                          numel);
    });
}

void dequantize(int format, std::uintptr_t blocks, std::uintptr_t values, int type,
                std::size_t numel) {
    with_type(values, type, [&](auto* typed) {
        offload::dequantize(static_cast<offload::Format>(format), at<const std::uint8_t>(blocks),
                            typed, numel);
    });
}

// A moment in codes: the address of the codes, the address of the first block's scale, the number
// of floats from one scale to the next, and whether the codes are of roots.
using Coded = std::tuple<std::uintptr_t, std::uintptr_t, std::size_t, bool>;

offload::CodedMoment coded(const Coded& given) {
    const auto& [codes, scales, stride, root] = given;
    return {at<offload::Code>(codes), at<float>(scales), stride, root};
}

void encode_moments(std::uintptr_t values, const Coded& moment, std::size_t numel) {
    const nb::gil_scoped_release no_gil;
    offload::encode_moments(at<const float>(values), coded(moment), numel);
}

void decode_moments(const Coded& moment, std::size_t offset, std::uintptr_t values,
                    std::size_t numel) {
    const nb::gil_scoped_release no_gil;
    offload::decode_moments(coded(moment), offset, at<float>(values), numel);
}

PyObject* name(const char* text) { return PyUnicode_InternFromString(text); }

nb::object owned(PyObject* found) {
    if (found == nullptr) nb::raise_python_error();
    return nb::steal(found);
}

// Memory to which gradients are added. `take` looks at a tensor by itself, through its Python
// object: the wrapper would spend more time on the checks than the kernel takes for small ones.
class Sum {
  public:
    Sum(std::uintptr_t out, int out_type, std::size_t numel, nb::object tensor, nb::object strided,
        nb::dict elements)
        : out_(out),
          out_type_(out_type),
          numel_(numel),
          tensor_(std::move(tensor)),
          strided_(std::move(strided)),
          elements_(std::move(elements)) {}

    // The sum of squares; None, and nothing is changed, if `grad` must be prepared first.
    nb::object take(nb::handle grad, bool add) const {
        static PyObject *const dtype = name("dtype"), *const layout = name("layout"),
                               *const is_cpu = name("is_cpu"), *const graph = name("requires_grad"),
                               *const count = name("numel"), *const dense = name("is_contiguous"),
                               *const negated = name("is_neg"), *const data_ptr = name("data_ptr");
        if (reinterpret_cast<PyObject*>(Py_TYPE(grad.ptr())) != tensor_.ptr()) return nb::none();
        const nb::object kind = attribute(grad, dtype);
        const nb::handle number = PyDict_GetItemWithError(elements_.ptr(), kind.ptr());
        if (!number && PyErr_Occurred()) nb::raise_python_error();
        if (!number || !attribute(grad, layout).is(strided_) || !is_true(attribute(grad, is_cpu)) ||
            is_true(attribute(grad, graph)) || integer(call(grad, count)) != numel_ ||
            !is_true(call(grad, dense)) || is_true(call(grad, negated)))
            return nb::none();
        const std::size_t address = integer(call(grad, data_ptr));
        if (address == 0) return nb::none();  // a storage without memory
        const int type = static_cast<int>(integer(number));
        const auto taken = [&] {
            return accumulate(out_, out_type_, address, type, numel_, add, numel_);
        };
        std::vector<double> squares;
        // Another thread would take the GIL meanwhile, and keep it for longer than this takes.
        if (numel_ <= kWithGil) {
            squares = taken();
        } else {
            const nb::gil_scoped_release no_gil;
            squares = taken();
        }
        return nb::float_(squares.empty() ? 0.0 : squares[0]);
    }

  private:
    static constexpr std::size_t kWithGil = 1 << 15;  // elements that take some microseconds

    static nb::object attribute(nb::handle self, PyObject* of) {
        return owned(PyObject_GetAttr(self.ptr(), of));
    }
    static nb::object call(nb::handle self, PyObject* method) {
        PyObject* all[] = {nullptr, self.ptr()};
        return owned(PyObject_VectorcallMethod(method, all + 1, 1 | PY_VECTORCALL_ARGUMENTS_OFFSET,
                                               nullptr));
    }
    static std::size_t integer(nb::handle number) {
        const std::size_t value = PyLong_AsSize_t(number.ptr());
        if (value == static_cast<std::size_t>(-1) && PyErr_Occurred()) nb::raise_python_error();
        return value;
    }
    static bool is_true(nb::handle value) { return value.ptr() == Py_True; }

    std::uintptr_t out_;
    int out_type_;
    std::size_t numel_;
    nb::object tensor_, strided_;
    nb::dict elements_;
};

nb::list supported_isas() { return listed(offload::supported_isas()); }

nb::list parse_cpus(const char* list) {
    const cpu_set_t cpus = offload::parse_cpus(list);
    nb::list found;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
        if (CPU_ISSET(static_cast<std::size_t>(cpu), &cpus)) found.append(cpu);
    }
    return found;
}

void run_beside(int node, const nb::list& allowed) {
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    for (const nb::handle each : allowed) {
        const auto cpu = nb::cast<std::size_t>(each);
        CPU_SET(cpu, &cpus);
    }
    offload::run_beside(node, cpus);
}

void configure(const char* isa, int threads) {
    offload::set_isa(isa);
    offload::set_thread_count(threads);
}

}  // namespace

NB_MODULE(_native, m) {
    nb::set_leak_warnings(false);  // sums may live until the process ends
    const nb::call_guard<nb::gil_scoped_release> no_gil;
    m.def("supported_isas", &supported_isas);
    m.def("configure", &configure);
    m.def("parse_cpus", &parse_cpus);
    m.def("run_beside", &run_beside);
    m.def("thread_count", &offload::thread_count);
    m.def("update", &update);
    m.def("lamb_moments", &lamb_moments);
    m.def("split_master", &split_master, no_gil);
    m.def("join_master", &join_master, no_gil);
    m.def("split_bf24", &split_bf24);
    m.def("join_bf24", &join_bf24);
    m.def("quantize", &quantize, no_gil);
    m.def("dequantize", &dequantize, no_gil);
    m.def("encode_moments", &encode_moments);
    m.def("decode_moments", &decode_moments);
    m.def("accumulate", &accumulated);
    nb::class_<Sum>(m, "Sum")
        .def(nb::init<std::uintptr_t, int, std::size_t, nb::object, nb::object, nb::dict>())
        .def("take", &Sum::take);
    m.def("sum_squares", &sum_squares);
}
