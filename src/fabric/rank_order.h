// SPDX-License-Identifier: Apache-2.0
// Reductions in rank order on top of a pairwise exchange: the additions of an element are always v[0] + v[1] + ... + v[P-1], so
// the result is the same on every rank, for every size and for every engine.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

#include "waybill/fabric.h"

namespace waybill::rank_order {

template <class T>
void accumulate(T* sum, const T* values, std::size_t count, ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      for (std::size_t i = 0; i < count; ++i) sum[i] += values[i];
      break;
    case ReduceOp::kMax:
      for (std::size_t i = 0; i < count; ++i) sum[i] = std::max(sum[i], values[i]);
      break;
    case ReduceOp::kMin:
      for (std::size_t i = 0; i < count; ++i) sum[i] = std::min(sum[i], values[i]);
      break;
  }
}

// The part of a collective's signature that names the reduction.
template <class T>
int reduce_detail(ReduceOp op) {
  return static_cast<int>(op) | static_cast<int>(std::is_same_v<T, std::int64_t> ? DType::kI64 : DTypeOf<T>::value) << 8;
}

// Each rank sums one part of `values` over all ranks, then hands it to the others. pairwise(send, receive) is a collective
// variable all-to-all. scratch is resized to about values.size() and can be kept for the next block.
template <class T, class Pairwise>
void reduce_block(std::span<T> values, std::vector<T>& scratch, ReduceOp op, int size, int rank, const Pairwise& pairwise) {
  const auto P = static_cast<std::size_t>(size);
  const auto me = static_cast<std::size_t>(rank);
  const std::size_t part = (values.size() + P - 1) / P;
  const auto begin = [&](std::size_t p) { return std::min(p * part, values.size()); };
  const auto bytes = [&](std::size_t p) { return (begin(p + 1) - begin(p)) * sizeof(T); };
  scratch.resize(P * part);
  std::vector<Fabric::Span> send(P), receive(P);
  for (std::size_t p = 0; p < P; ++p) {
    send[p] = Fabric::Span{values.data() + begin(p), bytes(p)};
    receive[p] = Fabric::Span{scratch.data() + p * part, bytes(me)};
  }
  pairwise(send, receive);
  const std::size_t count = begin(me + 1) - begin(me);
  for (std::size_t p = 1; p < P; ++p) accumulate(scratch.data(), scratch.data() + p * part, count, op);
  for (std::size_t p = 0; p < P; ++p) {
    send[p] = Fabric::Span{scratch.data(), bytes(me)};
    receive[p] = Fabric::Span{values.data() + begin(p), bytes(p)};
  }
  pairwise(send, receive);
}

}  // namespace waybill::rank_order
