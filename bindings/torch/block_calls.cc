// SPDX-License-Identifier: Apache-2.0
// The calls of an MoE block's plain eager mode, given PyTorch's tensors themselves: what a call needs is allocated by PyTorch, each tensor is looked at
// once, structs are filled on the stack. torch/_fast.py makes builtin functions of them for a shape of x.
#include "plan.h"

namespace waybill::torch {
namespace {

constexpr long kOtherLayout = -1;  // of d_out: Python makes a copy that fits and calls again

PyObject* bad_count() {
  (void)PyErr_BadArgument();
  return nullptr;
}

// The forward of either kind; saved is null in an evaluation. A status, or -1 with a Python error.
long run_forward(const Plan& plan, PyObject* const* arguments, void* out, void* saved) {
  Reader reader(plan);
  wb_tensor x = plan.x;
  wb_moe_tensors parameters = plan.parameters;
  wb_device_moe_outputs outputs = saved != nullptr ? plan.training : plan.evaluation;
  wb_stream stream;
  x.data = reader.pointer(arguments[0]);
  for (std::int32_t i = 0; i < plan.num_parameters; ++i) field(parameters, plan.fields[i]).data = reader.pointer(arguments[1 + i]);
  outputs.out.data = out;
  if (saved != nullptr) outputs.saved.data = saved;
  if (!reader.ok() || !current_stream(plan, stream)) return -1;
  const wb_moe_forward_options* const options = saved != nullptr ? &plan.options : &plan.evaluation_options;
  return without_lock([&] { return plan.forward(plan.layer, &parameters, &x, options, &outputs, &stream); });
}

// accept(x, *parameters) -> 1 where forward takes them, else 0.
PyObject* accept(PyObject* self, PyObject* const* arguments, std::intptr_t count) {
  const Plan& plan = plan_of(self);
  return PyLong_FromLong(count == 1 + plan.num_parameters && accepts(plan, arguments) ? 1 : 0);
}

// train(x, *parameters) -> (out, saved), or the wb_status of a call that failed.
PyObject* train(PyObject* self, PyObject* const* arguments, std::intptr_t count) {
  const Plan& plan = plan_of(self);
  if (count != 1 + plan.num_parameters) return bad_count();
  Owned out, saved, both(PyTuple_New(2));
  const long status = both ? run_training(plan, arguments, out, saved) : -1;
  if (status != WB_OK) return status < 0 ? nullptr : PyLong_FromLong(status);
  (void)PyTuple_SetItem(both.get(), 0, out.release()), (void)PyTuple_SetItem(both.get(), 1, saved.release());
  return both.release();
}

// evaluate(x, *parameters) -> out, or the wb_status of a call that failed.
PyObject* evaluate(PyObject* self, PyObject* const* arguments, std::intptr_t count) {
  const Plan& plan = plan_of(self);
  if (count != 1 + plan.num_parameters) return bad_count();
  Owned out;
  const long status = run_evaluation(plan, arguments, out);
  return status == WB_OK ? out.release() : status < 0 ? nullptr : PyLong_FromLong(status);
}

// gradients((x, saved, *parameters), d_out[, loss weights]) -> (dx, None, a gradient or None for each parameter), the wb_status of a call that
// failed, or kOtherLayout for a d_out that is not contiguous bfloat16.
PyObject* gradients(PyObject* self, PyObject* const* arguments, std::intptr_t count) {
  const Plan& plan = plan_of(self);
  if (count != 2 && count != 3) return bad_count();
  Reader reader(plan);
  const DlTensor d_out = reader.read(arguments[1]);
  if (!reader.ok()) return nullptr;
  if (!has_dtype(d_out, WB_BF16) || !is_contiguous(d_out)) return PyLong_FromLong(kOtherLayout);
  Owned result;
  const long status = run_backward(plan, arguments[0], d_out, count == 3 ? arguments[2] : nullptr, result);
  return status == WB_OK ? result.release() : status < 0 ? nullptr : PyLong_FromLong(status);
}

}  // namespace

bool accepts(const Plan& plan, PyObject* const* arguments) {
  DlTensor tensor{};
  bool all = fits(plan, arguments[0], plan.x.dtype, plan.x_shape, plan.x_rank, tensor) && reinterpret_cast<std::uintptr_t>(address(tensor)) % 16 == 0;
  for (std::int32_t i = 0; all && i < plan.num_parameters; ++i) {
    const wb_tensor& expected = field(plan.parameters, plan.fields[i]);
    all = fits(plan, arguments[1 + i], expected.dtype, expected.shape, expected.rank, tensor);
  }
  return all;
}

long run_training(const Plan& plan, PyObject* const* arguments, Owned& out, Owned& saved) {
  void *out_data = nullptr, *saved_data = nullptr;
  out.take(new_like(plan, 0, arguments[0], out_data));
  if (!out) return -1;
  saved.take(new_like(plan, 1, plan.room, saved_data));
  return saved ? run_forward(plan, arguments, out_data, saved_data) : -1;
}

long run_evaluation(const Plan& plan, PyObject* const* arguments, Owned& out) {
  void* data = nullptr;
  out.take(new_like(plan, 0, arguments[0], data));
  return out ? run_forward(plan, arguments, data, nullptr) : -1;
}

long run_backward(const Plan& plan, PyObject* given, const DlTensor& cotangent, PyObject* weights, Owned& gradients) {
  Reader reader(plan);
  wb_tensor x = plan.x, saved = plan.saved, d_out = plan.d_out, dx = plan.dx;
  wb_moe_tensors parameters = plan.parameters, sums = plan.gradients;
  wb_stream stream;
  gradients.take(PyTuple_New(2 + plan.num_parameters));
  if (!gradients) return -1;
  // Allocates what a tensor's gradient needs; the tuple owns it.
  const auto new_gradient = [&](PyObject* object, std::int32_t place, std::intptr_t index, void*& data) {
    PyObject* const made = new_like(plan, place, object, data);
    if (made != nullptr) (void)PyTuple_SetItem(gradients.get(), index, made);
    return made != nullptr;
  };
  PyObject* const rows = PyTuple_GetItem(given, 0);
  x.data = reader.pointer(rows), saved.data = reader.pointer(PyTuple_GetItem(given, 1));
  d_out.data = address(cotangent);
  if (!reader.ok() || !new_gradient(rows, 0, 0, dx.data)) return -1;
  (void)PyTuple_SetItem(gradients.get(), 1, none());
  for (std::int32_t i = 0; i < plan.num_parameters; ++i) {
    PyObject* const parameter = PyTuple_GetItem(given, 2 + i);
    field(parameters, plan.fields[i]).data = reader.pointer(parameter);
    if (!reader.ok()) return -1;
    if (plan.trained[i] == 0) {
      (void)PyTuple_SetItem(gradients.get(), 2 + i, none());
    } else if (!new_gradient(parameter, 2 + i, 2 + i, field(sums, plan.fields[i]).data)) {
      return -1;
    }
  }
  const auto* const loss_weights = static_cast<const float*>(weights != nullptr ? reader.pointer(weights) : nullptr);
  if (!reader.ok() || !current_stream(plan, stream)) return -1;
  return without_lock([&] { return plan.backward(plan.layer, &parameters, &sums, &x, &d_out, &dx, &plan.options, &saved, loss_weights, &stream); });
}

}  // namespace waybill::torch

extern "C" {
WBT_EXPORT extern const std::uint64_t wbt_plan_size;
const std::uint64_t wbt_plan_size = sizeof(waybill::torch::Plan);
WBT_EXPORT extern PyMethodDef wbt_methods[4];
PyMethodDef wbt_methods[4] = {{"accept", waybill::torch::accept, waybill::torch::kFastCall, nullptr},
                              {"train", waybill::torch::train, waybill::torch::kFastCall, nullptr},
                              {"evaluate", waybill::torch::evaluate, waybill::torch::kFastCall, nullptr},
                              {"gradients", waybill::torch::gradients, waybill::torch::kFastCall, nullptr}};
}
