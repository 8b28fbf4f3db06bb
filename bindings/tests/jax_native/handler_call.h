// SPDX-License-Identifier: Apache-2.0
// Calls an XLA FFI handler as XLA does, without XLA: one execution on a stream and a device.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "xla/ffi/api/ffi.h"

// XLA's own types behind the C interface.
struct XLA_FFI_Error {
  std::string message;
};
struct XLA_FFI_ExecutionContext {
  void* stream;
  std::int32_t ordinal;
  std::int64_t run;
};

namespace waybill::jax {

inline const XLA_FFI_Api& handler_api() {
  static const XLA_FFI_Api api = [] {
    XLA_FFI_Api a{};
    a.struct_size = XLA_FFI_Api_STRUCT_SIZE;
    a.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR};
    a.XLA_FFI_Error_Create = [](XLA_FFI_Error_Create_Args* args) { return new XLA_FFI_Error{args->message}; };
    a.XLA_FFI_Error_GetMessage = [](XLA_FFI_Error_GetMessage_Args* args) { args->message = args->error->message.c_str(); };
    a.XLA_FFI_Error_Destroy = [](XLA_FFI_Error_Destroy_Args* args) { delete args->error; };
    a.XLA_FFI_Stream_Get = [](XLA_FFI_Stream_Get_Args* args) -> XLA_FFI_Error* { return args->stream = args->ctx->stream, nullptr; };
    a.XLA_FFI_RunId_Get = [](XLA_FFI_RunId_Get_Args* args) -> XLA_FFI_Error* { return args->run_id = args->ctx->run, nullptr; };
    a.XLA_FFI_DeviceOrdinal_Get = [](XLA_FFI_DeviceOrdinal_Get_Args* args) -> XLA_FFI_Error* { return args->device_ordinal = args->ctx->ordinal, nullptr; };
    return a;
  }();
  return api;
}

class HandlerCall {
 public:
  using Dims = std::vector<std::int64_t>;

  HandlerCall& argument(void* data, XLA_FFI_DataType dtype, Dims dims) { return add(arguments_, data, dtype, std::move(dims)); }
  HandlerCall& result(void* data, XLA_FFI_DataType dtype, Dims dims) { return add(results_, data, dtype, std::move(dims)); }
  HandlerCall& attribute(const std::string& name, std::int64_t value) { return scalar(name, XLA_FFI_DataType_S64, value); }
  HandlerCall& flag(const std::string& name, bool value) { return scalar(name, XLA_FFI_DataType_PRED, value ? 1 : 0); }
  HandlerCall& attribute(const std::string& name, const std::vector<std::int32_t>& values) {
    return array(name, XLA_FFI_DataType_S32, values.data(), values.size(), 4);
  }
  template <class Struct>
  HandlerCall& bytes(const std::string& name, const Struct& value) {
    return array(name, XLA_FFI_DataType_U8, &value, sizeof(value), 1);
  }

  // The error's text; empty: none. May be called again.
  std::string run(XLA_FFI_Handler* handler, void* stream, std::int32_t ordinal, std::int64_t run_id = 0) {
    XLA_FFI_ExecutionContext context{stream, ordinal, run_id};
    Pointers arguments(arguments_), results(results_);
    std::vector<XLA_FFI_AttrType> types;
    std::vector<XLA_FFI_ByteSpan> names;
    std::vector<XLA_FFI_ByteSpan*> name_pointers;
    std::vector<void*> values;
    for (auto& [name, attribute] : attributes_) {  // sorted, as XLA gives them
      attribute.scalar = {attribute.dtype, attribute.memory.data()}, attribute.array = {attribute.dtype, attribute.count, attribute.memory.data()};
      types.push_back(attribute.is_array ? XLA_FFI_AttrType_ARRAY : XLA_FFI_AttrType_SCALAR);
      names.push_back({name.data(), name.size()});
      values.push_back(attribute.is_array ? static_cast<void*>(&attribute.array) : static_cast<void*>(&attribute.scalar));
    }
    for (XLA_FFI_ByteSpan& name : names) name_pointers.push_back(&name);
    std::vector<XLA_FFI_ArgType> argument_types(arguments_.size(), XLA_FFI_ArgType_BUFFER);
    std::vector<XLA_FFI_RetType> result_types(results_.size(), XLA_FFI_RetType_BUFFER);
    XLA_FFI_CallFrame frame{};
    frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
    frame.api = &handler_api();
    frame.ctx = &context;
    frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
    frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<std::int64_t>(arguments_.size()), argument_types.data(), arguments.all.data()};
    frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, static_cast<std::int64_t>(results_.size()), result_types.data(), results.all.data()};
    frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE, nullptr, static_cast<std::int64_t>(values.size()), types.data(), name_pointers.data(), values.data()};
    XLA_FFI_Error* const error = handler(&frame);
    if (error == nullptr) return {};
    std::string text = error->message;
    delete error;
    return text;
  }

 private:
  struct Buffer {
    void* data;
    XLA_FFI_DataType dtype;
    Dims dims;
    XLA_FFI_Buffer view{};
  };
  struct Pointers {
    explicit Pointers(std::deque<Buffer>& buffers) {
      for (Buffer& b : buffers) {
        b.view = {XLA_FFI_Buffer_STRUCT_SIZE, nullptr, b.dtype, b.data, static_cast<std::int64_t>(b.dims.size()), b.dims.data()};
        all.push_back(&b.view);
      }
    }
    std::vector<void*> all;
  };
  struct Attribute {
    bool is_array;
    XLA_FFI_DataType dtype;
    std::size_t count;
    std::vector<unsigned char> memory;
    XLA_FFI_Scalar scalar{};
    XLA_FFI_Array array{};
  };

  HandlerCall& add(std::deque<Buffer>& to, void* data, XLA_FFI_DataType dtype, Dims dims) {
    to.push_back({data, dtype, std::move(dims)});
    return *this;
  }
  // Little endian: a bool is the first byte.
  HandlerCall& scalar(const std::string& name, XLA_FFI_DataType dtype, std::int64_t value) { return set(name, false, dtype, &value, 1, sizeof(value)); }
  HandlerCall& array(const std::string& name, XLA_FFI_DataType dtype, const void* data, std::size_t count, std::size_t element) {
    return set(name, true, dtype, data, count, element);
  }
  HandlerCall& set(const std::string& name, bool is_array, XLA_FFI_DataType dtype, const void* data, std::size_t count, std::size_t element) {
    const auto* from = static_cast<const unsigned char*>(data);
    attributes_.insert_or_assign(name, Attribute{is_array, dtype, count, {from, from + count * element}});
    return *this;
  }

  std::deque<Buffer> arguments_, results_;
  std::map<std::string, Attribute> attributes_;
};

}  // namespace waybill::jax
