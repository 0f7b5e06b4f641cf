// The way of a gradient from autograd into the engine: a hook of each parameter, called nine times
// in the backward of a small transformer block. No handler of a signal runs within, since handlers
// run between instructions of Python; the functions of Python that are called defer them.
#pragma once

#include <utility>

#include "python.h"

namespace offload {

// Adds gradients of one parameter, of one chunk, to memory that the host can address.
class DirectAdd {
  public:
    // `take` stores or adds a gradient and returns its sum of squares, or None if the gradient must
    // be prepared first; then, where the call would wait, and for a unit that is `watched`, `other`
    // does all of it.
    DirectAdd(nb::object take, nb::object other, nb::object lock, nb::object reading,
              nb::object watched, nb::list squares, std::int64_t unit, std::int64_t segment)
        : take_(std::move(take)),
          other_(std::move(other)),
          lock_(std::move(lock)),
          reading_(std::move(reading)),
          watched_(std::move(watched)),
          squares_(std::move(squares)),
          unit_(nb::int_(unit)),
          key_(nb::make_tuple(segment, 0)),
          position_(unit) {}

    nb::object add(nb::handle gradient, nb::handle alone) const {
        if (!added(gradient)) apply(other_, gradient, alone);
        return nb::none();
    }

  private:
    bool added(nb::handle gradient) const {
        const TriedLock lock(lock_);
        if (!lock.held() || contains(reading_, unit_) || contains(watched_, unit_)) return false;
        const nb::object known = squares_[position_];
        const nb::object value =
            apply(take_, gradient, nb::handle(contains(known, key_) ? Py_True : Py_False));
        if (value.is_none()) return false;
        done(PyDict_SetItem(known.ptr(), key_.ptr(), value.ptr()));
        return true;
    }

    nb::object take_, other_, lock_, reading_, watched_;
    nb::list squares_;
    nb::object unit_, key_;
    std::size_t position_;
};

// The hook that autograd calls once it has added to `.grad` of a parameter.
class GradientHook {
  public:
    // `passes` begins the backward at its first sign; `plain_tensors` is the context in which a
    // placeholder is a plain tensor; `add` receives each gradient, and whether no other code of
    // Python refers to it. Only here nobody else does: each frame on the way would be one more.
    GradientHook(nb::object passes, nb::object plain_tensors, nb::object add)
        : passes_(std::move(passes)),
          plain_tensors_(std::move(plain_tensors)),
          add_(std::move(add)) {}

    nb::object take(nb::handle parameter) const {
        static PyObject *const in_backward = name("in_backward"),
                               *const begin_backward = name("begin_backward"),
                               *const gradient_seen = name("gradient_seen");
        if (!is_true(attribute(passes_, in_backward))) call(passes_, begin_backward);
        const nb::object gradient = taken(parameter);
        if (!gradient.is_none()) {
            apply(add_, gradient, nb::handle(Py_REFCNT(gradient.ptr()) == 1 ? Py_True : Py_False));
        }
        set_attribute(passes_, gradient_seen, nb::handle(Py_True));
        return nb::none();
    }

  private:
    // Taken from the parameter at once: a gradient left in `.grad` would occupy device memory until
    // the step.
    nb::object taken(nb::handle parameter) const {
        static PyObject* const grad = name("grad");
        const Context plain(plain_tensors_);
        nb::object gradient = attribute(parameter, grad);
        set_attribute(parameter, grad, nb::handle(Py_None));
        return gradient;
    }

    nb::object passes_, plain_tensors_, add_;
};

}  // namespace offload
