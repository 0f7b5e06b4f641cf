// The Python module of the engine: what is called dozens of times in each use of a unit, without
// the frames of Python between.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>

#include "gradients.h"
#include "saved_tensors.h"

using namespace offload;

NB_MODULE(_native, m) {
    nb::set_leak_warnings(false);  // a graph may live until the process ends
    m.attr("Plain") = nb::handle(reinterpret_cast<PyObject*>(Plain::type()));
    m.attr("Handle") = nb::handle(reinterpret_cast<PyObject*>(Handle::type()));
    m.def("plain_of", &Plain::of);
    m.def("handle_of", &handle_of);
    m.def("view_of", &view_of);
    nb::class_<Pack>(m, "Pack")
        .def(nb::init<nb::object, nb::object, nb::dict, nb::dict, nb::list, bool, nb::object>())
        .def("pack", &Pack::pack)
        .def_prop_ro("other", &Pack::other);
    nb::class_<Unpack>(m, "Unpack")
        .def(nb::init<nb::object, nb::object, nb::object, nb::object>(), nb::arg(), nb::arg(),
             nb::arg().none(), nb::arg())
        .def("unpack", &Unpack::unpack);
    nb::class_<DirectAdd>(m, "DirectAdd")
        .def(nb::init<nb::object, nb::object, nb::object, nb::object, nb::object, nb::list,
                      std::int64_t, std::int64_t>())
        .def("add", &DirectAdd::add);
    nb::class_<GradientHook>(m, "GradientHook")
        .def(nb::init<nb::object, nb::object, nb::object>())
        .def("take", &GradientHook::take);
}
