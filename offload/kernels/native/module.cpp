// The Python door of the kernels. It takes addresses: the wrapper in kernels/__init__.py has
// checked dtype, length, layout and device, and holds the tensors for as long as the call lasts.
#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>

#include "adamw.h"
#include "elementwise.h"
#include "isa.h"
#include "team.h"

namespace nb = nanobind;

namespace {

using offload::AdamWStep;
using offload::Bf16;

template <class T>
T* at(std::uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

// Addresses of arrays of `numel` elements. `residual` 0: the weight is fp32, else bf16.
void adamw(std::uintptr_t weight, std::uintptr_t residual, std::uintptr_t exp_avg,
           std::uintptr_t exp_avg_sq, std::uintptr_t grad, bool grad_bf16, std::size_t numel,
           double lr, double beta1, double beta2, double eps, double weight_decay,
           std::int64_t step, double grad_scale, bool decoupled) {
    const AdamWStep s{lr, beta1, beta2, eps, weight_decay, step, grad_scale, decoupled};
    const auto update = [&](auto master) {
        auto* m = at<float>(exp_avg);
        auto* v = at<float>(exp_avg_sq);
        if (grad_bf16) {
            offload::adamw(master, m, v, at<const Bf16>(grad), numel, s);
        } else {
            offload::adamw(master, m, v, at<const float>(grad), numel, s);
        }
    };
    if (residual == 0) {
        update(offload::WholeMaster{at<float>(weight)});
    } else {
        update(offload::SplitMaster{at<Bf16>(weight), at<std::int16_t>(residual)});
    }
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

double accumulate(std::uintptr_t out, bool out_bf16, std::uintptr_t grad, bool grad_bf16,
                  std::size_t numel, bool add) {
    const auto into = [&](auto* typed_out) {
        return grad_bf16 ? offload::accumulate(typed_out, at<const Bf16>(grad), numel, add)
                         : offload::accumulate(typed_out, at<const float>(grad), numel, add);
    };
    return out_bf16 ? into(at<Bf16>(out)) : into(at<float>(out));
}

double sum_squares(std::uintptr_t values, bool bf16, std::size_t numel) {
    return bf16 ? offload::sum_squares(at<const Bf16>(values), numel)
                : offload::sum_squares(at<const float>(values), numel);
}

nb::list supported_isas() {
    nb::list names;
    for (const std::string_view name : offload::supported_isas()) {
        names.append(nb::str(name.data(), name.size()));
    }
    return names;
}

void configure(const char* isa, int threads) {
    offload::set_isa(isa);
    offload::set_thread_count(threads);
}

}  // namespace

NB_MODULE(_native, m) {
    const nb::call_guard<nb::gil_scoped_release> no_gil;
    m.def("supported_isas", &supported_isas);
    m.def("configure", &configure);
    m.def("thread_count", &offload::thread_count);
    m.def("adamw", &adamw, no_gil);
    m.def("split_master", &split_master, no_gil);
    m.def("join_master", &join_master, no_gil);
    m.def("accumulate", &accumulate, no_gil);
    m.def("sum_squares", &sum_squares, no_gil);
}
