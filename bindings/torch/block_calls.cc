// SPDX-License-Identifier: Apache-2.0
// The two calls of an MoE block's plain eager mode, given PyTorch's tensors themselves: a call looks at each tensor once and fills structs on its
// stack. What torch/_fast.py makes of it are three builtin functions a shape of x.
#include <algorithm>
#include <cstddef>

#include "exchange_api.h"
#include "waybill/waybill.h"

namespace waybill::torch {
namespace {

constexpr std::int32_t kMaxParameters = 10, kMaxRank = 8;
constexpr long kOtherLayout = -1;  // of d_out: Python makes a copy that fits and calls again

// Filled by Python once (torch/_fast.py has the same struct), read only afterwards: threads need no lock but the layer's own.
struct Plan {
  std::uint64_t struct_size;
  const DlExchange* exchange;
  decltype(&wb_device_moe_forward) forward;
  decltype(&wb_device_moe_backward) backward;
  wb_device_moe* layer;
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

// The pointers of a call's arguments, one after the other.
class Arguments {
 public:
  Arguments(const Plan& plan, PyObject* const* first) : plan_(plan), next_(first) {}
  DlTensor read() {
    DlTensor tensor{};
    ok_ = ok_ && plan_.exchange->tensor_from_object(*next_++, &tensor) == 0;
    return tensor;
  }
  void* pointer() {
    const DlTensor tensor = read();
    return ok_ ? address(tensor) : nullptr;
  }
  bool ok() const { return ok_; }

 private:
  const Plan& plan_;
  PyObject* const* next_;
  bool ok_ = true;
};

bool current_stream(const Plan& plan, wb_stream& stream) {
  stream = plan.stream;
  return plan.device_type != kDlCuda || plan.exchange->current_stream(plan.device_type, plan.device_id, &stream.native) == 0;
}

// Other Python threads run while work is queued.
template <class Call>
PyObject* without_lock(const Call& call) {
  PyThreadState* const state = PyEval_SaveThread();
  const wb_status status = call();
  PyEval_RestoreThread(state);
  return PyLong_FromLong(status);
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

// forward(x, *parameters, out[, saved]) -> wb_status. Without saved: an evaluation.
PyObject* forward(PyObject* self, PyObject* const* arguments, std::intptr_t count) {
  const Plan& plan = plan_of(self);
  const bool trains = count == 3 + plan.num_parameters;
  if (!trains && count != 2 + plan.num_parameters) return bad_count();
  Arguments given(plan, arguments);
  wb_tensor x = plan.x;
  wb_moe_tensors parameters = plan.parameters;
  wb_device_moe_outputs outputs = trains ? plan.training : plan.evaluation;
  wb_stream stream;
  x.data = given.pointer();
  for (std::int32_t i = 0; i < plan.num_parameters; ++i) field(parameters, plan.fields[i]).data = given.pointer();
  outputs.out.data = given.pointer();
  if (trains) outputs.saved.data = given.pointer();
  if (!given.ok() || !current_stream(plan, stream)) return nullptr;
  return without_lock([&] { return plan.forward(plan.layer, &parameters, &x, trains ? &plan.options : &plan.evaluation_options, &outputs, &stream); });
}

// backward(x, saved, *parameters, d_out, dx, *gradients[, loss weights]) -> wb_status, or kOtherLayout for a d_out that is not contiguous bfloat16.
PyObject* backward(PyObject* self, PyObject* const* arguments, std::intptr_t count) {
  const Plan& plan = plan_of(self);
  const auto num_gradients = static_cast<std::int32_t>(std::count(plan.trained, plan.trained + plan.num_parameters, 1));
  const std::intptr_t least = 4 + plan.num_parameters + num_gradients;
  if (count != least && count != least + 1) return bad_count();
  Arguments given(plan, arguments);
  wb_tensor x = plan.x, saved = plan.saved, d_out = plan.d_out, dx = plan.dx;
  wb_moe_tensors parameters = plan.parameters, gradients = plan.gradients;
  wb_stream stream;
  x.data = given.pointer(), saved.data = given.pointer();
  for (std::int32_t i = 0; i < plan.num_parameters; ++i) field(parameters, plan.fields[i]).data = given.pointer();
  const DlTensor cotangent = given.read();
  if (given.ok() && !(has_dtype(cotangent, WB_BF16) && is_contiguous(cotangent))) return PyLong_FromLong(kOtherLayout);
  d_out.data = address(cotangent), dx.data = given.pointer();
  for (std::int32_t i = 0; i < plan.num_parameters; ++i) {
    if (plan.trained[i] != 0) field(gradients, plan.fields[i]).data = given.pointer();
  }
  const auto* const loss_weights = static_cast<const float*>(count > least ? given.pointer() : nullptr);
  if (!given.ok() || !current_stream(plan, stream)) return nullptr;
  return without_lock([&] { return plan.backward(plan.layer, &parameters, &gradients, &x, &d_out, &dx, &plan.options, &saved, loss_weights, &stream); });
}

}  // namespace
}  // namespace waybill::torch

extern "C" {
#define WBT_EXPORT __attribute__((visibility("default")))
WBT_EXPORT extern const std::uint64_t wbt_plan_size;
const std::uint64_t wbt_plan_size = sizeof(waybill::torch::Plan);
WBT_EXPORT extern PyMethodDef wbt_methods[3];
PyMethodDef wbt_methods[3] = {{"accept", waybill::torch::accept, waybill::torch::kFastCall, nullptr},
                              {"forward", waybill::torch::forward, waybill::torch::kFastCall, nullptr},
                              {"backward", waybill::torch::backward, waybill::torch::kFastCall, nullptr}};
}
