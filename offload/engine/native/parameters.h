// The switch of a unit's parameters between placeholders and weights, at each use of the unit. A
// parameter's handle (`params.paged_parameter`) keeps the state, under the names below.
#pragma once

#include "python.h"

namespace offload {

struct HandleNames {
    PyObject *const parameter = name("parameter"), *const kind = name("_class"),
                    *const version = name("_version"), *const address = name("_address"),
                    *const own = name("_own"), *const own_address = name("_own_address"),
                    *const gathered = name("gathered"), *const handle = name("offload_handle"),
                    *const data = name("data"), *const data_ptr = name("data_ptr"),
                    *const of_class = name("__class__"), *const attributes = name("__dict__");

    static const HandleNames& get() {
        static const HandleNames names;
        return names;
    }
};

inline void forget_handle(nb::handle parameter) {
    const HandleNames& names = HandleNames::get();
    const nb::object attributes = attribute(parameter, names.attributes);
    if (contains(attributes, names.handle)) done(PyDict_DelItem(attributes.ptr(), names.handle));
}

// Makes parameters ordinary ones over the memory of `values`, which must have their shapes.
inline void materialize(nb::list handles, nb::sequence values) {
    const HandleNames& names = HandleNames::get();
    std::size_t index = 0;
    for (const nb::handle memory : values) {
        const nb::object handle = handles[index++];
        const nb::object parameter = attribute(handle, names.parameter);
        // The class comes first: an assignment to `.data` of a placeholder would dispatch to its
        // rule.
        set_attribute(parameter, names.of_class, attribute(handle, names.kind));
        set_attribute(parameter, names.data, memory);
        set_attribute(handle, names.version, attribute(parameter, names.version));
        set_attribute(handle, names.address, call(parameter, names.data_ptr));
        forget_handle(parameter);
    }
}

// Makes parameters that have memory of their own ordinary ones again.
inline void show(nb::list handles) {
    const HandleNames& names = HandleNames::get();
    for (const nb::handle handle : handles) {
        const nb::object parameter = attribute(handle, names.parameter);
        set_attribute(parameter, names.of_class, attribute(handle, names.kind));
        set_attribute(handle, names.version, attribute(parameter, names.version));
        set_attribute(handle, names.address, attribute(handle, names.own_address));
        forget_handle(parameter);
    }
}

// Makes parameters placeholders, unless gathered; returns the handles of those that were changed in
// place or given other memory. `set_data` assigns `.data` where torch refuses.
inline nb::list release(nb::list handles, nb::handle placeholder, nb::handle set_data) {
    const HandleNames& names = HandleNames::get();
    nb::list changed;
    for (const nb::handle handle : handles) {
        const nb::object parameter = attribute(handle, names.parameter);
        if (reinterpret_cast<PyObject*>(Py_TYPE(parameter.ptr())) == placeholder.ptr() ||
            is_true(attribute(handle, names.gathered)))
            continue;
        const std::int64_t address = integer(call(parameter, names.data_ptr));
        if (address != integer(attribute(handle, names.address)) ||
            integer(attribute(parameter, names.version)) !=
                integer(attribute(handle, names.version)))
            changed.append(handle);
        // The data comes first, while the parameter is still an ordinary one: see `materialize`.
        if (address != integer(attribute(handle, names.own_address))) {
            const nb::object own = attribute(handle, names.own);
            if (PyObject_SetAttr(parameter.ptr(), names.data, own.ptr()) < 0) {
                // A type of device that torch treats otherwise.
                if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) nb::raise_python_error();
                PyErr_Clear();
                apply(set_data, parameter, own);
            }
        }
        const nb::object attributes = attribute(parameter, names.attributes);
        done(PyDict_SetItem(attributes.ptr(), names.handle, handle.ptr()));
        set_attribute(parameter, names.of_class, placeholder);
    }
    return changed;
}

}  // namespace offload
