// SPDX-License-Identifier: Apache-2.0
// The calls of an MoE block's plain eager mode, given PyTorch's tensors themselves: what a call needs is allocated by PyTorch, each tensor is looked at
// once, structs are filled on the stack. torch/_fast.py makes four builtin functions of it for a shape of x.
#include <algorithm>
#include <cstddef>
#include <utility>

#include "exchange_api.h"
#include "waybill/waybill.h"

namespace waybill::torch {
namespace {

constexpr std::int32_t kMaxParameters = 10, kMaxRank = 8;
constexpr long kOtherLayout = -1;  // of d_out: Python makes a copy that fits and calls again

// Filled by Python once (torch/_fast.py has the same struct and compares its size with wbt_plan_size), read only afterwards: threads need no lock but the
// layer's own.
struct Plan {
  const DlExchange* exchange;
  decltype(&wb_device_moe_forward) forward;
  decltype(&wb_device_moe_backward) backward;
  wb_device_moe* layer;
  PyObject* empty_like;                 // torch.empty_like
  PyObject* room;                       // empty_like of it: what a forward leaves for its backward
  std::int32_t device_type, device_id;  // DLPack's
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

const Plan& plan_of(PyObject* self) { return *static_cast<const Plan*>(PyCapsule_GetPointer(self, kName)); }

wb_tensor& field(wb_moe_tensors& tensors, std::int32_t index) { return (&tensors.gate)[index]; }
const wb_tensor& field(const wb_moe_tensors& tensors, std::int32_t index) { return (&tensors.gate)[index]; }

bool has_dtype(const DlTensor& tensor, std::int32_t dtype) {
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

bool is_contiguous(const DlTensor& tensor) {
  if (tensor.strides == nullptr || std::count(tensor.shape, tensor.shape + tensor.rank, 0) > 0) return true;
  std::int64_t expected = 1;
  for (std::int32_t axis = tensor.rank - 1; axis >= 0; --axis) {
    if (tensor.shape[axis] != 1 && tensor.strides[axis] != expected) return false;
    expected *= tensor.shape[axis];
  }
  return true;
}

void* address(const DlTensor& tensor) { return static_cast<std::byte*>(tensor.data) + tensor.byte_offset; }

// Whether the object is a tensor that the plan was made for. No Python error remains.
bool fits(const Plan& plan, PyObject* object, std::int32_t dtype, const std::int64_t* shape, std::int32_t rank, DlTensor& tensor) {
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
  explicit Owned(PyObject* object) : object_(object) {}
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() {
    if (object_ != nullptr) Py_DecRef(object_);
  }
  PyObject* get() const { return object_; }
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

PyObject* new_like(const Plan& plan, PyObject* object) { return PyObject_CallFunctionObjArgs(plan.empty_like, object, static_cast<PyObject*>(nullptr)); }

PyObject* none() {
  Py_IncRef(&_Py_NoneStruct);
  return &_Py_NoneStruct;
}

bool current_stream(const Plan& plan, wb_stream& stream) {
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

PyObject* bad_count() {
  (void)PyErr_BadArgument();
  return nullptr;
}

// accept(x, *parameters) -> 1 where forward takes them, else 0.
PyObject* accept(PyObject* self, PyObject* const* arguments, std::intptr_t count) {
  const Plan& plan = plan_of(self);
  if (count != 1 + plan.num_parameters) return PyLong_FromLong(0);
  DlTensor tensor{};
  bool all = fits(plan, arguments[0], plan.x.dtype, plan.x_shape, plan.x_rank, tensor) && reinterpret_cast<std::uintptr_t>(address(tensor)) % 16 == 0;
  for (std::int32_t i = 0; all && i < plan.num_parameters; ++i) {
    const wb_tensor& expected = field(plan.parameters, plan.fields[i]);
    all = fits(plan, arguments[1 + i], expected.dtype, expected.shape, expected.rank, tensor);
  }
  return PyLong_FromLong(all ? 1 : 0);
}

// The forward of either kind; saved is null in an evaluation. A status, or -1 with a Python error.
long run_forward(const Plan& plan, PyObject* const* arguments, PyObject* out, PyObject* saved) {
  Reader reader(plan);
  wb_tensor x = plan.x;
  wb_moe_tensors parameters = plan.parameters;
  wb_device_moe_outputs outputs = saved != nullptr ? plan.training : plan.evaluation;
  wb_stream stream;
  x.data = reader.pointer(arguments[0]);
  for (std::int32_t i = 0; i < plan.num_parameters; ++i) field(parameters, plan.fields[i]).data = reader.pointer(arguments[1 + i]);
  outputs.out.data = reader.pointer(out);
  if (saved != nullptr) outputs.saved.data = reader.pointer(saved);
  if (!reader.ok() || !current_stream(plan, stream)) return -1;
  const wb_moe_forward_options* const options = saved != nullptr ? &plan.options : &plan.evaluation_options;
  return without_lock([&] { return plan.forward(plan.layer, &parameters, &x, options, &outputs, &stream); });
}

// train(x, *parameters) -> (out, saved), or the wb_status of a call that failed.
PyObject* train(PyObject* self, PyObject* const* arguments, std::intptr_t count) {
  const Plan& plan = plan_of(self);
  if (count != 1 + plan.num_parameters) return bad_count();
  Owned out(new_like(plan, arguments[0])), saved(new_like(plan, plan.room));
  if (out.get() == nullptr || saved.get() == nullptr) return nullptr;
  const long status = run_forward(plan, arguments, out.get(), saved.get());
  if (status != WB_OK) return status < 0 ? nullptr : PyLong_FromLong(status);
  Owned result(PyTuple_New(2));
  if (result.get() == nullptr) return nullptr;
  (void)PyTuple_SetItem(result.get(), 0, out.release()), (void)PyTuple_SetItem(result.get(), 1, saved.release());
  return result.release();
}

// evaluate(x, *parameters) -> out, or the wb_status of a call that failed.
PyObject* evaluate(PyObject* self, PyObject* const* arguments, std::intptr_t count) {
  const Plan& plan = plan_of(self);
  if (count != 1 + plan.num_parameters) return bad_count();
  Owned out(new_like(plan, arguments[0]));
  if (out.get() == nullptr) return nullptr;
  const long status = run_forward(plan, arguments, out.get(), nullptr);
  if (status != WB_OK) return status < 0 ? nullptr : PyLong_FromLong(status);
  return out.release();
}

// gradients((x, saved, *parameters), d_out[, loss weights]) -> (dx, None, None, a gradient or None for each parameter), the wb_status of a call that
// failed, or kOtherLayout for a d_out that is not contiguous bfloat16.
PyObject* gradients(PyObject* self, PyObject* const* arguments, std::intptr_t count) {
  const Plan& plan = plan_of(self);
  if (count != 2 && count != 3) return bad_count();
  Reader reader(plan);
  const DlTensor cotangent = reader.read(arguments[1]);
  if (!reader.ok()) return nullptr;
  if (!has_dtype(cotangent, WB_BF16) || !is_contiguous(cotangent)) return PyLong_FromLong(kOtherLayout);
  wb_tensor x = plan.x, saved = plan.saved, d_out = plan.d_out, dx = plan.dx;
  wb_moe_tensors parameters = plan.parameters, sums = plan.gradients;
  wb_stream stream;
  Owned result(PyTuple_New(3 + plan.num_parameters));
  if (result.get() == nullptr) return nullptr;
  // Allocates what a tensor's gradient needs; the tuple owns it.
  const auto gradient_of = [&](PyObject* object, std::intptr_t index) {
    PyObject* const made = object != nullptr ? new_like(plan, object) : nullptr;
    void* const data = reader.pointer(made);
    if (made != nullptr) (void)PyTuple_SetItem(result.get(), index, made);
    return data;
  };
  PyObject* const rows = PyTuple_GetItem(arguments[0], 0);
  x.data = reader.pointer(rows), saved.data = reader.pointer(PyTuple_GetItem(arguments[0], 1));
  d_out.data = address(cotangent);
  if (!reader.ok()) return nullptr;
  dx.data = gradient_of(rows, 0);
  (void)PyTuple_SetItem(result.get(), 1, none()), (void)PyTuple_SetItem(result.get(), 2, none());
  for (std::int32_t i = 0; i < plan.num_parameters && reader.ok(); ++i) {
    PyObject* const parameter = PyTuple_GetItem(arguments[0], 2 + i);
    field(parameters, plan.fields[i]).data = reader.pointer(parameter);
    if (plan.trained[i] != 0) {
      field(sums, plan.fields[i]).data = gradient_of(parameter, 3 + i);
    } else {
      (void)PyTuple_SetItem(result.get(), 3 + i, none());
    }
  }
  const auto* const loss_weights = static_cast<const float*>(count == 3 ? reader.pointer(arguments[2]) : nullptr);
  if (!reader.ok() || !current_stream(plan, stream)) return nullptr;
  const wb_status status =
      without_lock([&] { return plan.backward(plan.layer, &parameters, &sums, &x, &d_out, &dx, &plan.options, &saved, loss_weights, &stream); });
  return status == WB_OK ? result.release() : PyLong_FromLong(status);
}

}  // namespace
}  // namespace waybill::torch

extern "C" {
#define WBT_EXPORT __attribute__((visibility("default")))
WBT_EXPORT extern const std::uint64_t wbt_plan_size;
const std::uint64_t wbt_plan_size = sizeof(waybill::torch::Plan);
WBT_EXPORT extern PyMethodDef wbt_methods[4];
PyMethodDef wbt_methods[4] = {{"accept", waybill::torch::accept, waybill::torch::kFastCall, nullptr},
                              {"train", waybill::torch::train, waybill::torch::kFastCall, nullptr},
                              {"evaluate", waybill::torch::evaluate, waybill::torch::kFastCall, nullptr},
                              {"gradients", waybill::torch::gradients, waybill::torch::kFastCall, nullptr}};
}
