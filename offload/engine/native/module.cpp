// The Python module of the engine: hooks for saved tensors, which autograd calls dozens of times in
// each block. They call torch through its Python objects, as the code in Python did, without the
// frames of Python between; and what they return to the graph is unknown to the collector of
// garbage, which would look through thousands of tuples in each pass.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace nb = nanobind;

namespace {

PyObject* name(const char* text) { return PyUnicode_InternFromString(text); }

nb::object owned(PyObject* found) {
    if (found == nullptr) nb::raise_python_error();
    return nb::steal(found);
}

nb::object attribute(nb::handle self, PyObject* of) {
    return owned(PyObject_GetAttr(self.ptr(), of));
}

// Calls a method with up to three arguments.
template <class... Arguments>
nb::object call(nb::handle self, PyObject* method, Arguments... arguments) {
    PyObject* all[] = {nullptr, self.ptr(), arguments.ptr()...};
    constexpr std::size_t count = 1 + sizeof...(Arguments);
    return owned(PyObject_VectorcallMethod(method, all + 1, count | PY_VECTORCALL_ARGUMENTS_OFFSET,
                                           nullptr));
}

std::int64_t integer(nb::handle number) {
    const std::int64_t value = PyLong_AsLongLong(number.ptr());
    if (value == -1 && PyErr_Occurred()) nb::raise_python_error();
    return value;
}

// A saved tensor that is no weight; detached, since the graph must not reference itself.
struct Plain {
    nb::object tensor;
    std::int64_t version;

    static Plain of(nb::handle tensor) {
        static PyObject* const detach = name("detach");
        return {call(tensor, detach), version_of(tensor)};
    }
    static std::int64_t version_of(nb::handle tensor) {
        static PyObject* const version = name("_version");
        return integer(attribute(tensor, version));
    }
    bool unchanged() const { return version_of(tensor) == version; }
};

// A description of a saved view of weights, by its place in the unit.
struct Handle {
    std::int64_t unit, updates;
    nb::object dtype, size, stride, offset;

    static Handle of(std::int64_t unit, std::int64_t updates, nb::handle view) {
        static PyObject *const dtype = name("dtype"), *const shape = name("shape"),
                               *const stride = name("stride"),
                               *const offset = name("storage_offset");
        return {unit,
                updates,
                attribute(view, dtype),
                attribute(view, shape),
                call(view, stride),
                call(view, offset)};
    }
    // The view, made again from all weights of the unit in the view's dtype.
    nb::object from(nb::handle flat) const {
        static PyObject* const as_strided = name("as_strided");
        return call(flat, as_strided, size, stride, offset);
    }
};

// The pack hook: plain tensors and views of weights that are in use. All else is for `other`.
class Pack {
  public:
    using Range = std::pair<std::uintptr_t, std::uintptr_t>;

    Pack(nb::object tensor, nb::object parameter, nb::dict bindings, nb::dict placeholders,
         std::vector<Range> arena, bool innermost, nb::object other)
        : tensor_(std::move(tensor)),
          parameter_(std::move(parameter)),
          bindings_(std::move(bindings)),
          placeholders_(std::move(placeholders)),
          arena_(std::move(arena)),
          innermost_(innermost),
          other_(std::move(other)) {}

    nb::object pack(nb::handle tensor) const {
        const auto kind = reinterpret_cast<PyObject*>(Py_TYPE(tensor.ptr()));
        if (kind == tensor_.ptr() || kind == parameter_.ptr()) {
            const nb::object address = address_of(tensor);
            const auto place = address ? static_cast<std::uintptr_t>(integer(address)) : 0;
            if (place != 0 && in_arena(place)) {
                nb::object handle = handle_of(tensor, place);
                if (handle) return handle;
            } else if (place != 0 && innermost_ && !contains(placeholders_, address)) {
                return nb::cast(Plain::of(tensor));
            }
        }
        return other_(tensor);
    }

    nb::object other() const { return other_; }

  private:
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

    static bool contains(nb::handle dict, nb::handle key) {
        const int found = PyDict_Contains(dict.ptr(), key.ptr());
        if (found < 0) nb::raise_python_error();
        return found != 0;
    }

    // The handle of a view of weights that are bound; nothing if they are not, or never move.
    nb::object handle_of(nb::handle tensor, std::uintptr_t place) const {
        static PyObject *const storage_offset = name("storage_offset"),
                               *const itemsize = name("itemsize"), *const flat = name("flat"),
                               *const unit = name("unit"), *const updates = name("updates");
        const auto before =
            integer(call(tensor, storage_offset)) * integer(attribute(tensor, itemsize));
        const nb::object key =
            owned(PyLong_FromUnsignedLongLong(place - static_cast<std::uintptr_t>(before)));
        const nb::handle binding = PyDict_GetItemWithError(bindings_.ptr(), key.ptr());
        if (!binding && PyErr_Occurred()) nb::raise_python_error();
        if (!binding || attribute(binding, flat).is_none()) return {};
        const nb::object since = attribute(binding, updates);
        if (since.is_none()) return {};
        return nb::cast(Handle::of(integer(attribute(binding, unit)), integer(since), tensor));
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
    Unpack(nb::object view, nb::object other) : view_(std::move(view)), other_(std::move(other)) {}

    nb::object unpack(nb::handle packed) const {
        const Plain* plain = nullptr;
        if (nb::try_cast<const Plain*>(packed, plain) && plain != nullptr)
            return plain->unchanged() ? plain->tensor : other_(packed);
        return nb::isinstance<Handle>(packed) ? view_(packed) : other_(packed);
    }

  private:
    nb::object view_, other_;
};

}  // namespace

NB_MODULE(_native, m) {
    nb::set_leak_warnings(false);  // a graph may live until the process ends
    nb::class_<Plain>(m, "Plain")
        .def_static("of", &Plain::of)
        .def_ro("tensor", &Plain::tensor)
        .def_ro("version", &Plain::version);
    nb::class_<Handle>(m, "Handle")
        .def_static("of", &Handle::of)
        .def("from_flat", &Handle::from)
        .def_ro("unit", &Handle::unit)
        .def_ro("updates", &Handle::updates)
        .def_ro("dtype", &Handle::dtype);
    nb::class_<Pack>(m, "Pack")
        .def(nb::init<nb::object, nb::object, nb::dict, nb::dict, std::vector<Pack::Range>, bool,
                      nb::object>())
        .def("pack", &Pack::pack)
        .def_prop_ro("other", &Pack::other);
    nb::class_<Unpack>(m, "Unpack")
        .def(nb::init<nb::object, nb::object>())
        .def("unpack", &Unpack::unpack);
}
