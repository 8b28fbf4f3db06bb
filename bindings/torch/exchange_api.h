// SPDX-License-Identifier: Apache-2.0
// What this library uses of Python's stable ABI (3.10 and later) and of the function table by which a framework gives out its tensors' memory
// (DLPack 1.3, `__dlpack_c_exchange_api__`). Declared here so that no header of either is needed: one build serves every CPython 3 and PyTorch.
#pragma once

#include <cstdint>

extern "C" {

// Python's symbols are in the process that loads this library, as for any extension module.
struct PyObject;
extern PyObject _Py_NoneStruct;
void Py_IncRef(PyObject* object);
void Py_DecRef(PyObject* object);
PyObject* PyLong_FromLong(long value);
PyObject* PyTuple_New(std::intptr_t size);
PyObject* PyTuple_GetItem(PyObject* tuple, std::intptr_t index);              // borrowed
int PyTuple_SetItem(PyObject* tuple, std::intptr_t index, PyObject* object);  // takes object
std::intptr_t PyTuple_Size(PyObject* tuple);
PyObject* PyObject_Call(PyObject* callable, PyObject* arguments, PyObject* named);
PyObject* PyObject_CallNoArgs(PyObject* callable);
PyObject* PyObject_CallFunctionObjArgs(PyObject* callable, ...);  // arguments up to a null
PyObject* PyObject_GetAttr(PyObject* object, PyObject* name);
PyObject* PyObject_GetAttrString(PyObject* object, const char* name);
int PyObject_SetAttr(PyObject* object, PyObject* name, PyObject* value);
PyObject* PyObject_GenericGetDict(PyObject* object, void* context);
int PyObject_IsTrue(PyObject* object);
PyObject* PyDict_GetItemWithError(PyObject* dict, PyObject* key);  // borrowed
int PyDict_Contains(PyObject* dict, PyObject* key);
std::intptr_t PyDict_Size(PyObject* dict);
PyObject* PyErr_Occurred();  // borrowed
PyObject* PyObject_Type(PyObject* object);
void* PyCapsule_GetPointer(PyObject* capsule, const char* name);
void PyErr_Clear();
int PyErr_BadArgument();
struct PyThreadState;
PyThreadState* PyEval_SaveThread();
void PyEval_RestoreThread(PyThreadState* state);

struct PyMethodDef {
  const char* name;
  PyObject* (*function)(PyObject* self, PyObject* const* arguments, std::intptr_t count);
  int flags;
  const char* doc;
};

}  // extern "C"

#define WBT_EXPORT __attribute__((visibility("default")))

namespace waybill::torch {

constexpr int kFastCall = 0x0080;  // METH_FASTCALL

constexpr std::int32_t kDlCpu = 1, kDlCuda = 2;
constexpr std::uint8_t kDlUInt = 1, kDlFloat = 2, kDlBfloat = 4;

struct DlTensor {
  void* data;
  std::int32_t device_type, device_id;
  std::int32_t rank;
  std::uint8_t code, bits;
  std::uint16_t lanes;
  const std::int64_t* shape;
  const std::int64_t* strides;  // null: contiguous
  std::uint64_t byte_offset;
};

struct DlExchange {
  std::uint32_t major, minor;
  const DlExchange* previous;
  void* allocate;
  void* managed_from_object;
  void* managed_to_object;
  int (*tensor_from_object)(void* object, DlTensor* tensor);  // borrows; non-zero: a Python error is set. May be null.
  int (*current_stream)(std::int32_t device_type, std::int32_t device_id, void** stream);
};

}  // namespace waybill::torch
