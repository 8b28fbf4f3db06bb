// SPDX-License-Identifier: Apache-2.0
// The block's autograd node without a frame of Python's own: `step` decides whether a call is plain and makes it; `forward` and `backward` are what PyTorch's
// autograd.Function calls. A state is Python's tuple (calls, loss scale, capsule of the plan, None or function(loss scale) -> loss weights).
#include "plan.h"

namespace waybill::torch {
namespace {

constexpr std::intptr_t kScale = 1, kPlan = 2, kWeights = 3;  // of a state

// Whether what a call or an attribute gave is true; -1 with a Python error. Lets it go.
int truth(PyObject* object) {
  const Owned owned(object);
  return owned ? PyObject_IsTrue(owned.get()) : -1;
}

// Python's exception for a wb_status; does nothing to the error that is there already (-1).
PyObject* raise(const Plan& plan, long status) {
  const Owned number(status > 0 ? PyLong_FromLong(status) : nullptr);
  if (number) const Owned nothing(PyObject_CallFunctionObjArgs(plan.check, number.get(), static_cast<PyObject*>(nullptr)));
  return nullptr;
}

PyObject* bad_count() {
  (void)PyErr_BadArgument();
  return nullptr;
}

// Whether x is a tensor and no transform or mode is active; -1 with a Python error.
int is_plain(const Plan& plan, PyObject* x) {
  const Owned type(PyObject_Type(x));
  if (type.get() != plan.tensor_type) return type ? 0 : -1;
  for (PyObject* const transform : plan.transforms) {
    if (const int active = truth(PyObject_CallNoArgs(transform)); active != 0) return active < 0 ? -1 : 0;
  }
  return 1;
}

// Whether autograd records a call of these tensors; -1 with a Python error.
int is_recorded(const Plan& plan, PyObject* const* tensors) {
  if (const int enabled = truth(PyObject_CallNoArgs(plan.is_grad_enabled)); enabled <= 0) return enabled;
  for (std::int32_t i = 0; i <= plan.num_parameters; ++i) {
    if (const int needed = truth(PyObject_GetAttr(tensors[i], plan.requires_grad)); needed != 0) return needed;
  }
  return 0;
}

PyObject* new_reference(PyObject* object) {
  Py_IncRef(object);
  return object;
}

// out, or None for a call that is not plain or not like the plan's. tensors: x, parameters.
PyObject* step_of(const Plan& plan, PyObject* state, PyObject* const* tensors) {
  if (const int plain = is_plain(plan, tensors[0]); plain <= 0) return plain < 0 ? nullptr : none();
  if (!accepts(plan, tensors)) return none();
  const int recorded = is_recorded(plan, tensors);
  if (recorded < 0) return nullptr;
  if (recorded == 0) {
    Owned out;
    const long status = run_evaluation(plan, tensors, out);
    return status == WB_OK ? out.release() : raise(plan, status);
  }
  const Owned inputs(PyTuple_New(2 + plan.num_parameters));
  if (!inputs) return nullptr;
  (void)PyTuple_SetItem(inputs.get(), 0, new_reference(tensors[0])), (void)PyTuple_SetItem(inputs.get(), 1, new_reference(state));
  for (std::int32_t i = 0; i < plan.num_parameters; ++i) (void)PyTuple_SetItem(inputs.get(), 2 + i, new_reference(tensors[1 + i]));
  return PyObject_Call(plan.apply, inputs.get(), nullptr);
}

// step(state, x, *parameters).
PyObject* step(PyObject* self, PyObject* const* arguments, std::intptr_t count) {
  const Plan& plan = plan_of(self);
  return count == 2 + plan.num_parameters ? step_of(plan, arguments[0], arguments + 1) : none();
}

// What `call` looks up, in the order of _fast.py's tuple: names in a module's __dict__, then of each parameter the submodule ("" for the module itself), the
// dict that it is in and its name.
enum Name : std::intptr_t {
  kHooks = 0,        // four names of dicts that must be empty
  kOverrides = 4,    // two names that must not be there
  kGlobalHooks = 6,  // four dicts that must be empty
  kTraining = 10,
  kLossScale,
  kStates,
  kModules,
  kZero,
  kTensors
};

// A value of a dict, null where it is not there. What is no dict makes a Python error, which is left.
PyObject* item(PyObject* dict, PyObject* key) { return dict != nullptr ? PyDict_GetItemWithError(dict, key) : nullptr; }

// Parameter `index` of those in names.
PyObject* parameter_of(PyObject* module, PyObject* modules, PyObject* names, std::int32_t index) {
  PyObject *const part = PyTuple_GetItem(names, kTensors + 3 * index), *const kind = PyTuple_GetItem(names, kTensors + 3 * index + 1);
  PyObject* const name = PyTuple_GetItem(names, kTensors + 3 * index + 2);
  if (part == &_Py_NoneStruct) return item(item(module, kind), name);
  PyObject* const submodule = item(modules, part);
  const Owned dict(submodule != nullptr ? PyObject_GenericGetDict(submodule, nullptr) : nullptr);
  return item(item(dict.get(), kind), name);  // the module keeps it
}

bool has_hooks(PyObject* module, PyObject* names) {
  for (std::intptr_t i = 0; i < 4; ++i) {
    PyObject* const own = item(module, PyTuple_GetItem(names, kHooks + i));
    if (own == nullptr || PyDict_Size(own) != 0 || PyDict_Size(PyTuple_GetItem(names, kGlobalHooks + i)) != 0) return true;
  }
  return PyDict_Contains(module, PyTuple_GetItem(names, kOverrides)) != 0 || PyDict_Contains(module, PyTuple_GetItem(names, kOverrides + 1)) != 0;
}

// call(a module's __dict__, x) -> out; None where the call is another's: hooks, another shape, parameters that are not plain ones, ...
PyObject* call(PyObject* names, PyObject* const* arguments, std::intptr_t count) {
  const auto other = [] { return PyErr_Occurred() != nullptr ? nullptr : none(); };
  PyObject* const module = arguments[0];
  if (count != 2 || has_hooks(module, names)) return other();
  PyObject *const states = item(module, PyTuple_GetItem(names, kStates)), *const training = item(module, PyTuple_GetItem(names, kTraining));
  PyObject* const modules = item(module, PyTuple_GetItem(names, kModules));
  if (states == nullptr || training == nullptr || modules == nullptr) return other();
  PyObject* const scale = PyObject_IsTrue(training) == 1 ? item(module, PyTuple_GetItem(names, kLossScale)) : PyTuple_GetItem(names, kZero);
  PyObject* const state = scale != nullptr ? item(states, scale) : nullptr;
  PyObject* const capsule = state != nullptr ? PyTuple_GetItem(state, kPlan) : nullptr;
  if (capsule == nullptr || capsule == &_Py_NoneStruct) return other();
  const Plan& plan = plan_of(capsule);
  if (PyTuple_Size(names) != kTensors + 3 * plan.num_parameters) return none();
  PyObject* tensors[1 + kMaxParameters] = {arguments[1]};
  for (std::int32_t i = 0; i < plan.num_parameters; ++i) {
    tensors[1 + i] = parameter_of(module, modules, names, i);
    if (tensors[1 + i] == nullptr) return other();
  }
  return step_of(plan, state, tensors);
}

// forward(ctx, x, state, *parameters) -> out.
PyObject* forward(PyObject* /*self*/, PyObject* const* arguments, std::intptr_t count) {
  if (count < 3) return bad_count();
  PyObject *const context = arguments[0], *const state = arguments[2];
  PyObject* const capsule = PyTuple_GetItem(state, kPlan);
  if (capsule == nullptr) return nullptr;
  const Plan& plan = plan_of(capsule);
  if (count != 3 + plan.num_parameters) return bad_count();
  PyObject* tensors[1 + kMaxParameters] = {arguments[1]};
  std::copy(arguments + 3, arguments + count, tensors + 1);
  Owned out, saved;
  if (const long status = run_training(plan, tensors, out, saved); status != WB_OK) return raise(plan, status);
  const Owned kept(PyTuple_New(2 + plan.num_parameters));
  if (!kept) return nullptr;
  (void)PyTuple_SetItem(kept.get(), 0, new_reference(tensors[0])), (void)PyTuple_SetItem(kept.get(), 1, saved.release());
  for (std::int32_t i = 0; i < plan.num_parameters; ++i) (void)PyTuple_SetItem(kept.get(), 2 + i, new_reference(tensors[1 + i]));
  if (PyObject_SetAttr(context, plan.to_save, kept.get()) != 0 || PyObject_SetAttr(context, plan.rest, state) != 0) return nullptr;
  return out.release();
}

// backward(ctx, d_out) -> the gradients of forward's inputs. What is rare is left to the function in Python: second derivatives, a d_out of another layout.
PyObject* backward(PyObject* context, PyObject* const* arguments, std::intptr_t count) {
  const Owned state(PyObject_GetAttrString(context, "rest"));
  if (!state) return nullptr;
  PyObject* const capsule = PyTuple_GetItem(state.get(), kPlan);
  if (capsule == nullptr) return nullptr;
  const Plan& plan = plan_of(capsule);
  if (count != 1) return bad_count();
  const int enabled = truth(PyObject_CallNoArgs(plan.is_grad_enabled));
  if (enabled < 0) return nullptr;
  DlTensor d_out{};
  if (enabled > 0 || !fits(plan, arguments[0], WB_BF16, plan.x_shape, plan.x_rank, d_out)) {
    return PyObject_CallFunctionObjArgs(plan.slow_backward, context, arguments[0], static_cast<PyObject*>(nullptr));
  }
  const Owned given(PyObject_GetAttr(context, plan.saved_tensors));
  if (!given) return nullptr;
  Owned weights;
  if (PyObject* const weights_of = PyTuple_GetItem(state.get(), kWeights); weights_of != &_Py_NoneStruct) {
    weights.take(PyObject_CallFunctionObjArgs(weights_of, PyTuple_GetItem(state.get(), kScale), static_cast<PyObject*>(nullptr)));
    if (!weights) return nullptr;
  }
  Owned gradients;
  const long status = run_backward(plan, given.get(), d_out, weights.get(), gradients);
  return status == WB_OK ? gradients.release() : raise(plan, status);
}

}  // namespace
}  // namespace waybill::torch

extern "C" {
WBT_EXPORT extern PyMethodDef wbt_node_methods[4];
PyMethodDef wbt_node_methods[4] = {{"step", waybill::torch::step, waybill::torch::kFastCall, nullptr},
                                   {"forward", waybill::torch::forward, waybill::torch::kFastCall, nullptr},
                                   {"apply", waybill::torch::backward, waybill::torch::kFastCall, nullptr},
                                   {"call", waybill::torch::call, waybill::torch::kFastCall, nullptr}};
}
