// Hooks for saved tensors, which autograd calls dozens of times in each block. What they return to
// the graph is unknown to the collector of garbage, which would look through thousands of tuples in
// each pass.
#pragma once

#include <structmember.h>

#include <cstddef>
#include <utility>
#include <vector>

#include "python.h"

namespace offload {

// A type of Python whose objects are `T`. nanobind would enter each object into a table of its own,
// and a forward makes some 34 objects for each block of a transformer.
template <class T>
PyTypeObject* packed_type(const char* title, PyMemberDef* members) {
    const destructor dealloc = [](PyObject* self) {
        PyTypeObject* const type = Py_TYPE(self);
        reinterpret_cast<T*>(self)->drop();
        PyObject_Free(self);
        Py_DECREF(type);
    };
    PyType_Slot slots[] = {
        {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)}, {Py_tp_members, members}, {0, nullptr}};
    PyType_Spec spec = {title, sizeof(T), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                        slots};
    return reinterpret_cast<PyTypeObject*>(owned(PyType_FromSpec(&spec)).release().ptr());
}

template <class T>
T* allocated(PyTypeObject* type) {
    T* const made = PyObject_New(T, type);
    if (made == nullptr) nb::raise_python_error();
    return made;
}

inline std::int64_t version_of(nb::handle tensor) {
    static PyObject* const version = name("_version");
    return integer(attribute(tensor, version));
}

// A saved tensor that is no weight; detached, since the graph must not reference itself.
struct Plain {
    PyObject_HEAD PyObject* tensor;
    long long version;

    static PyTypeObject* type() {
        static PyMemberDef members[] = {{"tensor", T_OBJECT_EX, offsetof(Plain, tensor), READONLY},
                                        {"version", T_LONGLONG, offsetof(Plain, version), READONLY},
                                        {}};
        static PyTypeObject* const type =
            packed_type<Plain>("offload.engine._native.Plain", members);
        return type;
    }
    static nb::object of(nb::handle tensor) {
        static PyObject* const detach = name("detach");
        nb::object detached = call(tensor, detach);
        const std::int64_t version = version_of(tensor);
        Plain* const made = allocated<Plain>(type());
        made->tensor = detached.release().ptr();
        made->version = version;
        return nb::steal(reinterpret_cast<PyObject*>(made));
    }
    static const Plain* in(nb::handle packed) {
        return Py_TYPE(packed.ptr()) == type() ? reinterpret_cast<const Plain*>(packed.ptr())
                                               : nullptr;
    }
    bool unchanged() const { return version_of(tensor) == version; }
    void drop() { Py_DECREF(tensor); }
};

// A description of a saved view of weights, by its place in the unit.
struct Handle {
    PyObject_HEAD long long unit, updates;
    PyObject *dtype, *size, *stride, *offset;

    static PyTypeObject* type() {
        static PyMemberDef members[] = {
            {"unit", T_LONGLONG, offsetof(Handle, unit), READONLY},
            {"updates", T_LONGLONG, offsetof(Handle, updates), READONLY},
            {"dtype", T_OBJECT_EX, offsetof(Handle, dtype), READONLY},
            {}};
        static PyTypeObject* const type =
            packed_type<Handle>("offload.engine._native.Handle", members);
        return type;
    }
    static nb::object of(std::int64_t unit, std::int64_t updates, nb::handle view,
                         nb::object offset) {
        static PyObject *const dtype_name = name("dtype"), *const shape_name = name("shape"),
                               *const stride_name = name("stride");
        nb::object dtype = attribute(view, dtype_name), size = attribute(view, shape_name),
                   stride = call(view, stride_name);
        Handle* const made = allocated<Handle>(type());
        made->unit = unit;
        made->updates = updates;
        made->dtype = dtype.release().ptr();
        made->size = size.release().ptr();
        made->stride = stride.release().ptr();
        made->offset = offset.release().ptr();
        return nb::steal(reinterpret_cast<PyObject*>(made));
    }
    static const Handle* in(nb::handle packed) {
        return Py_TYPE(packed.ptr()) == type() ? reinterpret_cast<const Handle*>(packed.ptr())
                                               : nullptr;
    }
    // The view, made again from all weights of the unit in the view's dtype.
    nb::object from(nb::handle flat) const {
        static PyObject* const as_strided = name("as_strided");
        return call(flat, as_strided, nb::handle(size), nb::handle(stride), nb::handle(offset));
    }
    void drop() {
        for (PyObject* each : {dtype, size, stride, offset}) Py_DECREF(each);
    }
};

inline nb::object offset_of(nb::handle tensor) {
    static PyObject* const storage_offset = name("storage_offset");
    return call(tensor, storage_offset);
}

inline nb::object handle_of(std::int64_t unit, std::int64_t updates, nb::handle view) {
    return Handle::of(unit, updates, view, offset_of(view));
}

inline nb::object view_of(nb::handle packed, nb::handle flat) {
    const Handle* const handle = Handle::in(packed);
    if (handle == nullptr) throw nb::type_error("expected a Handle");
    return handle->from(flat);
}

// The pack hook: plain tensors and views of weights that are in use. All else is for `other`.
class Pack {
  public:
    // `arena` has the (start, stop) of each range of addresses. It is converted here: see [Note:
    // arguments without memory] in kernels/native/module.cpp.
    Pack(nb::object tensor, nb::object parameter, nb::dict bindings, nb::dict placeholders,
         const nb::list& arena, bool innermost, nb::object other)
        : tensor_(std::move(tensor)),
          parameter_(std::move(parameter)),
          bindings_(std::move(bindings)),
          placeholders_(std::move(placeholders)),
          innermost_(innermost),
          other_(std::move(other)) {
        for (const nb::handle range : arena) arena_.push_back(nb::cast<Range>(range));
    }

    nb::object pack(nb::handle tensor) const {
        const auto kind = reinterpret_cast<PyObject*>(Py_TYPE(tensor.ptr()));
        if (kind == tensor_.ptr() || kind == parameter_.ptr()) {
            const nb::object address = address_of(tensor);
            const auto place = address ? static_cast<std::uintptr_t>(integer(address)) : 0;
            if (place != 0 && in_arena(place)) {
                nb::object handle = packed_view(tensor, place);
                if (handle) return handle;
            } else if (place != 0 && innermost_ && !contains(placeholders_, address)) {
                return Plain::of(tensor);
            }
        }
        return other_(tensor);
    }

    nb::object other() const { return other_; }

  private:
    using Range = std::pair<std::uintptr_t, std::uintptr_t>;

    // The address of the first element; nothing for a tensor without a storage.
    static nb::object address_of(nb::handle tensor) {
        static PyObject* const data_ptr = name("data_ptr");
        PyObject* self[] = {nullptr, tensor.ptr()};
        PyObject* found = PyObject_VectorcallMethod(data_ptr, self + 1,
                                                    1 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
        if (found == nullptr && PyErr_ExceptionMatches(PyExc_RuntimeError)) PyErr_Clear();
        if (found == nullptr && PyErr_Occurred()) nb::raise_python_error();
        return nb::steal(found);
    }

    bool in_arena(std::uintptr_t place) const {
        for (const auto& [start, stop] : arena_)
            if (start <= place && place < stop) return true;
        return false;
    }

    // The handle of a view of weights that are bound; nothing if they are not, or never move.
    nb::object packed_view(nb::handle tensor, std::uintptr_t place) const {
        static PyObject *const itemsize = name("itemsize"), *const flat = name("flat"),
                               *const unit = name("unit"), *const updates = name("updates");
        const nb::object offset = offset_of(tensor);
        const auto before = integer(offset) * integer(attribute(tensor, itemsize));
        const nb::object key =
            owned(PyLong_FromUnsignedLongLong(place - static_cast<std::uintptr_t>(before)));
        const nb::handle binding = PyDict_GetItemWithError(bindings_.ptr(), key.ptr());
        if (!binding && PyErr_Occurred()) nb::raise_python_error();
        if (!binding || attribute(binding, flat).is_none()) return {};
        const nb::object since = attribute(binding, updates);
        if (since.is_none()) return {};
        return Handle::of(integer(attribute(binding, unit)), integer(since), tensor, offset);
    }

    nb::object tensor_, parameter_;
    nb::dict bindings_, placeholders_;
    std::vector<Range> arena_;
    bool innermost_;
    nb::object other_;
};

// The unpack hook, which a graph holds: plain tensors that are unchanged, and views, which `view`
// makes. All else is for `other`.
class Unpack {
  public:
    // `views` has the binding of the last view as `recent`, guarded by `lock`, or is None;
    // `under_modes` tells whether torch would call code of others for a view made here.
    Unpack(nb::object view, nb::object other, nb::object views, nb::object under_modes)
        : view_(std::move(view)),
          other_(std::move(other)),
          views_(std::move(views)),
          under_modes_(std::move(under_modes)) {}

    nb::object unpack(nb::handle packed) const {
        if (const Plain* const plain = Plain::in(packed))
            return plain->unchanged() ? nb::borrow(plain->tensor) : other_(packed);
        const Handle* const handle = Handle::in(packed);
        if (handle == nullptr) return other_(packed);
        const nb::object view = views_.is_none() ? nb::object() : further_view(*handle);
        return view ? view : view_(packed);
    }

  private:
    // A view of the unit of the last view, as a backward needs several in a row; nothing for
    // another unit, or where an upload may have to be waited for.
    nb::object further_view(const Handle& handle) const {
        static PyObject *const lock = name("lock"), *const recent = name("recent"),
                               *const unit = name("unit"), *const updates = name("updates"),
                               *const waits = name("waits"), *const flat = name("flat"),
                               *const dtype = name("dtype");
        const nb::object guard = attribute(views_, lock);
        const TriedLock held(guard);
        if (!held.held()) return {};
        const nb::object binding = attribute(views_, recent);
        if (binding.is_none() || integer(attribute(binding, unit)) != handle.unit ||
            integer(attribute(binding, updates)) != handle.updates ||
            is_true(attribute(binding, waits)) || is_true(apply(under_modes_)))
            return {};
        const nb::object weights = attribute(binding, flat);
        if (attribute(weights, dtype).ptr() != handle.dtype) return {};
        return handle.from(weights);
    }

    nb::object view_, other_, views_, under_modes_;
};

}  // namespace offload
