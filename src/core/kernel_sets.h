// SPDX-License-Identifier: Apache-2.0
// One op's kernels once for every instruction set: which of them this machine runs and which is in use. All sets of an op take the same
// calls, so the choice is made once, by the machine, not call by call as in core/implementation.h; WB_FORCE and WB_LOG mean the same.
#pragma once

#include <atomic>
#include <mutex>
#include <string>
#include <string_view>

#include "core/cpu_features.h"
#include "core/implementation.h"

// Attributes of a function compiled for an instruction set; cpu_has_avx2() and cpu_has_avx512() say where it may be called.
#if defined(__x86_64__)
#define WB_TARGET_AVX2 __attribute__((target("avx2,fma")))
#if defined(__clang__)
#define WB_TARGET_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))
#else
#define WB_TARGET_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prefer-vector-width=512")))
#endif
#endif

namespace waybill::detail {

// Those this machine can run, best first.
template <class Set>
struct UsableSets {
  const Set* sets[3];
  int count;
};

// `Set` holds functions and `const char* name`; it lives as long as the program. Safe to use from any thread.
template <class Set, class List = UsableSets<Set>>
class KernelSets {
 public:
  // op: its name in WB_FORCE and WB_LOG. Null: not compiled on this architecture.
  KernelSets(const char* op, const Set* avx512, const Set* avx2, const Set& portable) : op_(op) {
    if (avx512 != nullptr && cpu_has_avx512()) usable_.sets[usable_.count++] = avx512;
    if (avx2 != nullptr && cpu_has_avx2()) usable_.sets[usable_.count++] = avx2;
    usable_.sets[usable_.count++] = &portable;
  }

  const List& usable() const { return usable_; }

  // The set in use: what force() or WB_FORCE names, else the best; null = the reference loops ("ref").
  const Set* selected() {
    const Set* set = selected_.load(std::memory_order_relaxed);
    if (set == nullptr) {
      const std::lock_guard lock(first_use_);
      set = selected_.load();
      if (set == nullptr) {
        set = find(forced_implementation(op_));
        selected_.store(set);
      }
    }
    return set == &reference_ ? nullptr : set;
  }

  // "" or null returns to the default. kUnsupported, with what this machine runs, for any other name.
  void force(const char* name) {
    const std::string wanted = name == nullptr ? "" : name;
    selected_.store(find(wanted.empty() ? forced_implementation(op_) : wanted));
  }

 private:
  const Set* find(std::string_view name) const {
    if (name.empty()) {
      if (selection_is_logged()) log_selection(op_, usable_.sets[0]->name, "");
      return usable_.sets[0];
    }
    if (name == "ref") return &reference_;
    std::string known = "ref";
    for (int i = 0; i < usable_.count; ++i) {
      if (name == usable_.sets[i]->name) return usable_.sets[i];
      known += std::string(", ") + usable_.sets[i]->name;
    }
    WB_FAIL(ErrorCode::kUnsupported, "{} implementation \"{}\" was asked for; this machine can run: {}", op_, name, known);
  }

  const char* op_;
  List usable_{};
  Set reference_{};  // its address stands for "ref"
  std::mutex first_use_;
  std::atomic<const Set*> selected_{nullptr};  // null until first use
};

}  // namespace waybill::detail
