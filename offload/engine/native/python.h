// Calls of Python from C++, as short as the interpreter's own: torch is used through its Python
// objects, so that one build serves every version of it.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

namespace nb = nanobind;

namespace offload {

inline PyObject* name(const char* text) { return PyUnicode_InternFromString(text); }

inline nb::object owned(PyObject* found) {
    if (found == nullptr) nb::raise_python_error();
    return nb::steal(found);
}

inline void done(int failed) {
    if (failed < 0) nb::raise_python_error();
}

inline nb::object attribute(nb::handle self, PyObject* of) {
    return owned(PyObject_GetAttr(self.ptr(), of));
}

inline void set_attribute(nb::handle self, PyObject* of, nb::handle value) {
    done(PyObject_SetAttr(self.ptr(), of, value.ptr()));
}

// Calls a method with up to five arguments.
template <class... Arguments>
nb::object call(nb::handle self, PyObject* method, Arguments... arguments) {
    PyObject* all[] = {nullptr, self.ptr(), arguments.ptr()...};
    constexpr std::size_t count = 1 + sizeof...(Arguments);
    return owned(PyObject_VectorcallMethod(method, all + 1, count | PY_VECTORCALL_ARGUMENTS_OFFSET,
                                           nullptr));
}

// Calls a function.
template <class... Arguments>
nb::object apply(nb::handle function, Arguments... arguments) {
    PyObject* all[] = {nullptr, arguments.ptr()...};
    constexpr std::size_t count = sizeof...(Arguments);
    return owned(PyObject_Vectorcall(function.ptr(), all + 1,
                                     count | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr));
}

inline std::int64_t integer(nb::handle number) {
    const std::int64_t value = PyLong_AsLongLong(number.ptr());
    if (value == -1 && PyErr_Occurred()) nb::raise_python_error();
    return value;
}

inline bool is_true(nb::handle value) {
    const int found = PyObject_IsTrue(value.ptr());
    done(found);
    return found != 0;
}

inline bool contains(nb::handle container, nb::handle key) {
    const int found = PySequence_Contains(container.ptr(), key.ptr());
    done(found);
    return found != 0;
}

// Calls a method in a destructor, where an exception may be on its way and none can be raised.
template <class... Arguments>
void call_at_end(nb::handle self, PyObject* method, Arguments... arguments) {
    const nb::error_scope kept;
    PyObject* all[] = {nullptr, self.ptr(), arguments.ptr()...};
    constexpr std::size_t count = 1 + sizeof...(Arguments);
    Py_XDECREF(PyObject_VectorcallMethod(method, all + 1, count | PY_VECTORCALL_ARGUMENTS_OFFSET,
                                         nullptr));
}

// A context of Python, made by a call of `of` and entered as long as this object lives.
class Context {
  public:
    explicit Context(nb::handle of) : context_(apply(of)) {
        static PyObject* const enter = name("__enter__");
        call(context_, enter);
    }
    Context(const Context&) = delete;
    Context& operator=(const Context&) = delete;
    ~Context() {
        static PyObject* const exit = name("__exit__");
        const nb::handle none(Py_None);
        call_at_end(context_, exit, none, none, none);
    }

  private:
    nb::object context_;
};

// A lock of Python's `threading`, held as long as this object lives if no other thread holds it.
class TriedLock {
  public:
    explicit TriedLock(nb::handle lock) : lock_(lock) {
        static PyObject* const acquire = name("acquire");
        held_ = is_true(call(lock, acquire, nb::handle(Py_False)));
    }
    TriedLock(const TriedLock&) = delete;
    TriedLock& operator=(const TriedLock&) = delete;
    ~TriedLock() {
        static PyObject* const release = name("release");
        if (held_) call_at_end(lock_, release);
    }
    // False if another thread holds the lock, for which only Python may wait: a signal's handler
    // may run there.
    bool held() const { return held_; }

  private:
    nb::handle lock_;
    bool held_;
};

}  // namespace offload
