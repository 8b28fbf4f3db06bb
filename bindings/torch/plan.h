// SPDX-License-Identifier: Apache-2.0
// What the calls of one block with an x of one shape have in common, and how PyTorch's tensors are read.
#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>

#include "exchange_api.h"
#include "waybill/waybill.h"

namespace waybill::torch {

constexpr std::int32_t kMaxParameters = 10, kMaxRank = 8;

// Filled by Python once (torch/_fast.py has the same struct and compares its size with wbt_plan_size), read only afterwards: threads need no lock but the
// layer's own.
struct Plan {
  const DlExchange* exchange;
  decltype(&wb_device_moe_forward) forward;
  decltype(&wb_device_moe_backward) backward;
  wb_device_moe* layer;
  PyObject* empty_like;                                      // torch.empty_like
  PyObject* empty;                                           // function(*arguments) -> a tensor, quicker; null: there is none
  PyObject* empty_arguments[2 + kMaxParameters];             // for it: x, room, each parameter's gradient
  PyObject* room;                                            // empty_like of it: what a forward leaves for its backward
  PyObject* tensor_type;                                     // torch.Tensor
  PyObject* apply;                                           // of the autograd function
  PyObject* slow_backward;                                   // its backward in Python
  PyObject* check;                                           // raises what a wb_status stands for
  PyObject* is_grad_enabled;                                 // functions without arguments
  PyObject* transforms[2];                                   // truthy where a transform or a mode would have to see the call
  PyObject *requires_grad, *to_save, *saved_tensors, *rest;  // names of attributes
  std::int32_t device_type, device_id;                       // DLPack's
  std::int32_t num_parameters, x_rank;
  std::int32_t fields[kMaxParameters];   // of wb_moe_tensors, in the order of the parameters
  std::int32_t trained[kMaxParameters];  // whether it has a gradient
  std::int64_t x_shape[kMaxRank];
  wb_moe_tensors parameters, gradients;  // all but the pointers
  wb_tensor x, d_out, dx, saved;         // as [T, H]
  wb_device_moe_outputs training, evaluation;
  wb_moe_forward_options options, evaluation_options;
  wb_stream stream;
};

constexpr const char* kName = "waybill.plan";

inline const Plan& plan_of(PyObject* self) { return *static_cast<const Plan*>(PyCapsule_GetPointer(self, kName)); }

inline wb_tensor& field(wb_moe_tensors& tensors, std::int32_t index) { return (&tensors.gate)[index]; }
inline const wb_tensor& field(const wb_moe_tensors& tensors, std::int32_t index) { return (&tensors.gate)[index]; }

inline bool has_dtype(const DlTensor& tensor, std::int32_t dtype) {
  if (tensor.lanes != 1) return false;
  switch (dtype) {
    case WB_BF16:
      return tensor.code == kDlBfloat && tensor.bits == 16;
    case WB_F32:
      return tensor.code == kDlFloat && tensor.bits == 32;
    case WB_U8:
      return tensor.code == kDlUInt && tensor.bits == 8;
    default:
      return false;
  }
}

inline bool is_contiguous(const DlTensor& tensor) {
  if (tensor.strides == nullptr || std::count(tensor.shape, tensor.shape + tensor.rank, 0) > 0) return true;
  std::int64_t expected = 1;
  for (std::int32_t axis = tensor.rank - 1; axis >= 0; --axis) {
    if (tensor.shape[axis] != 1 && tensor.strides[axis] != expected) return false;
    expected *= tensor.shape[axis];
  }
  return true;
}

inline void* address(const DlTensor& tensor) { return static_cast<std::byte*>(tensor.data) + tensor.byte_offset; }

// Whether the object is a tensor that the plan was made for. No Python error remains.
inline bool fits(const Plan& plan, PyObject* object, std::int32_t dtype, const std::int64_t* shape, std::int32_t rank, DlTensor& tensor) {
  if (plan.exchange->tensor_from_object(object, &tensor) != 0) {
    PyErr_Clear();
    return false;
  }
  return tensor.device_type == plan.device_type && tensor.device_id == plan.device_id && has_dtype(tensor, dtype) && tensor.rank == rank &&
         std::equal(shape, shape + rank, tensor.shape) && is_contiguous(tensor);
}

// A reference of this function's own.
class Owned {
 public:
  explicit Owned(PyObject* object = nullptr) : object_(object) {}
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() {
    if (object_ != nullptr) Py_DecRef(object_);
  }
  PyObject* get() const { return object_; }
  explicit operator bool() const { return object_ != nullptr; }
  void take(PyObject* object) { object_ = object; }  // of an empty one
  PyObject* release() { return std::exchange(object_, nullptr); }

 private:
  PyObject* object_;
};

// What a call's tensors are, one after the other; after the first that is none, ok() is false and a Python error is set.
class Reader {
 public:
  explicit Reader(const Plan& plan) : plan_(plan) {}
  DlTensor read(PyObject* object) {
    DlTensor tensor{};
    ok_ = ok_ && object != nullptr && plan_.exchange->tensor_from_object(object, &tensor) == 0;
    return tensor;
  }
  void* pointer(PyObject* object) {
    const DlTensor tensor = read(object);
    return ok_ ? address(tensor) : nullptr;
  }
  bool ok() const { return ok_; }

 private:
  const Plan& plan_;
  bool ok_ = true;
};

// A new tensor like `object`, which is the plan's number `index`: 0 x, 1 the room, 2... the parameters. The quicker way gives memory of the current device.
inline PyObject* new_like(const Plan& plan, std::int32_t index, PyObject* object, void*& data) {
  DlTensor made{};
  if (plan.empty != nullptr) {
    Owned quick(PyObject_Call(plan.empty, plan.empty_arguments[index], nullptr));
    if (!quick || plan.exchange->tensor_from_object(quick.get(), &made) != 0) return nullptr;
    data = address(made);
    if (made.device_type == plan.device_type && made.device_id == plan.device_id) return quick.release();
  }
  Owned like(PyObject_CallFunctionObjArgs(plan.empty_like, object, static_cast<PyObject*>(nullptr)));
  if (!like || plan.exchange->tensor_from_object(like.get(), &made) != 0) return nullptr;
  data = address(made);
  return like.release();
}

inline PyObject* none() {
  Py_IncRef(&_Py_NoneStruct);
  return &_Py_NoneStruct;
}

inline bool current_stream(const Plan& plan, wb_stream& stream) {
  stream = plan.stream;
  return plan.device_type != kDlCuda || plan.exchange->current_stream(plan.device_type, plan.device_id, &stream.native) == 0;
}

// Other Python threads run while work is queued.
template <class Call>
wb_status without_lock(const Call& call) {
  PyThreadState* const state = PyEval_SaveThread();
  const wb_status status = call();
  PyEval_RestoreThread(state);
  return status;
}

// Forward and backward, of block_calls.cc. x_and_parameters: what `accepts` takes. WB_OK with new references, a wb_status of the library's call, or -1 with a
// Python error.
bool accepts(const Plan& plan, PyObject* const* x_and_parameters);
long run_training(const Plan& plan, PyObject* const* x_and_parameters, Owned& out, Owned& saved);
long run_evaluation(const Plan& plan, PyObject* const* x_and_parameters, Owned& out);
// given: the tuple (x, saved, *parameters). gradients: a tuple (dx, None, a gradient or None for each parameter).
long run_backward(const Plan& plan, PyObject* given, const DlTensor& d_out, PyObject* loss_weights, Owned& gradients);

}  // namespace waybill::torch
