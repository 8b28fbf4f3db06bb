// SPDX-License-Identifier: Apache-2.0
// Every PTX instruction the kernels use, one wrapper each. Kernels contain no inline assembly of their own.
#pragma once

#include <cstdint>

namespace waybill::ptx {

inline constexpr unsigned kFullWarp = 0xffffffffu;

// No instruction: the compiler cannot compute anything from the value ahead of this place.
__device__ __forceinline__ void hide(std::int64_t& value) { asm volatile("" : "+l"(value)); }
// threadIdx.x read here and now: nothing that follows from it is held in registers from an earlier place.
__device__ __forceinline__ int thread_index() {
  int r;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(r));
  return r;
}

// --- warp reductions (sm_80): every lane gets the result ---
__device__ __forceinline__ unsigned redux_max(unsigned v) {
  unsigned r;
  asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(r) : "r"(v));
  return r;
}
__device__ __forceinline__ unsigned redux_min(unsigned v) {
  unsigned r;
  asm volatile("redux.sync.min.u32 %0, %1, 0xffffffff;" : "=r"(r) : "r"(v));
  return r;
}
__device__ __forceinline__ unsigned redux_add(unsigned v) {
  unsigned r;
  asm volatile("redux.sync.add.u32 %0, %1, 0xffffffff;" : "=r"(r) : "r"(v));
  return r;
}
__device__ __forceinline__ unsigned redux_or(unsigned v) {
  unsigned r;
  asm volatile("redux.sync.or.b32 %0, %1, 0xffffffff;" : "=r"(r) : "r"(v));
  return r;
}
__device__ __forceinline__ unsigned lanemask_lt() {
  unsigned r;
  asm("mov.u32 %0, %%lanemask_lt;" : "=r"(r));
  return r;
}

// threadIdx.x, read anew: what is computed from it need not stay in a register in between.
__device__ __forceinline__ unsigned thread_again() {
  unsigned r;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(r));
  return r;
}

// --- approximate functions: 2^x to 2 ulp, 1/x to 1 ulp ---
__device__ __forceinline__ float ex2_approx(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
__device__ __forceinline__ float rcp_approx(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

// --- minimum and maximum that pass NaN on (sm_80) ---
__device__ __forceinline__ float min_nan(float a, float b) {
  float r;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
__device__ __forceinline__ float max_nan(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

// Byte i of the result is the byte of {b, a} (a lowest) that bits 4 i .. 4 i + 2 of `selector` name, or its sign in all bits where bit 4 i + 3 is set.
__device__ __forceinline__ std::uint32_t permute_bytes(std::uint32_t a, std::uint32_t b, std::uint32_t selector) {
  std::uint32_t r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(selector));
  return r;
}

// --- global loads and stores that are used once ---
__device__ __forceinline__ uint4 ld_stream_v4(const void* p) {
  uint4 r;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(p));
  return r;
}
__device__ __forceinline__ uint2 ld_stream_v2(const void* p) {
  uint2 r;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(r.x), "=r"(r.y) : "l"(p));
  return r;
}

// --- fire-and-forget integer add in global memory ---
__device__ __forceinline__ void red_add(std::uint32_t* p, std::uint32_t v) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

// --- copies of 16 bytes to shared memory (sm_80), asynchronous; with is_there false zeros are written and nothing is read ---
__device__ __forceinline__ void copy_async_16(std::uint32_t smem, const void* gmem, bool is_there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem), "l"(gmem), "r"(is_there ? 16 : 0) : "memory");
}
// The same with 4 bytes, which pass through the L1.
__device__ __forceinline__ void copy_async_4(std::uint32_t smem, const void* gmem, bool is_there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(smem), "l"(gmem), "r"(is_there ? 4 : 0) : "memory");
}
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// --- flags between CTAs and GPUs ---
__device__ __forceinline__ std::uint32_t atom_add_acq_rel_gpu(std::uint32_t* p, std::uint32_t v) {
  std::uint32_t r;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(r) : "l"(p), "r"(v) : "memory");
  return r;
}
__device__ __forceinline__ std::uint32_t ld_relaxed_gpu(const std::uint32_t* p) {
  std::uint32_t r;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(r) : "l"(p) : "memory");
  return r;
}
__device__ __forceinline__ std::uint32_t atom_add_relaxed_gpu(std::uint32_t* p, std::uint32_t v) {
  std::uint32_t r;
  asm volatile("atom.add.relaxed.gpu.global.u32 %0, [%1], %2;" : "=r"(r) : "l"(p), "r"(v) : "memory");
  return r;
}
__device__ __forceinline__ void fence_acq_rel_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
__device__ __forceinline__ void fence_acq_rel_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
__device__ __forceinline__ void st_release_sys(std::uint32_t* p, std::uint32_t v) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ void st_release_gpu(std::uint32_t* p, std::uint32_t v) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ std::uint32_t ld_acquire_gpu(const std::uint32_t* p) {
  std::uint32_t r;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(r) : "l"(p) : "memory");
  return r;
}
__device__ __forceinline__ std::uint32_t ld_acquire_sys(const std::uint32_t* p) {
  std::uint32_t r;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(r) : "l"(p) : "memory");
  return r;
}
__device__ __forceinline__ std::uint64_t global_timer_ns() {
  std::uint64_t r;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(r));
  return r;
}

// Barrier `id` (1 to 15) among `threads` threads, whole warps.
__device__ __forceinline__ void named_barrier(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// --- mbarrier and bulk copies (sm_90) ---
__device__ __forceinline__ std::uint32_t smem_address(const void* p) { return static_cast<std::uint32_t>(__cvta_generic_to_shared(p)); }
__device__ __forceinline__ void mbarrier_init(std::uint64_t* bar, std::uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(bar)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void mbarrier_arrive_expect(std::uint64_t* bar, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(bar)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void mbarrier_wait(std::uint64_t* bar, std::uint32_t parity) {
  asm volatile("{\n .reg .pred p;\n WAIT_%=:\n mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n @p bra DONE_%=;\n bra WAIT_%=;\n DONE_%=:\n}" ::"r"(
                   smem_address(bar)),
               "r"(parity)
               : "memory");
}
// Whether the phase is over; may wait a little.
__device__ __forceinline__ bool mbarrier_try(std::uint64_t* bar, std::uint32_t parity) {
  std::uint32_t is_over;
  asm volatile("{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
               : "=r"(is_over)
               : "r"(smem_address(bar)), "r"(parity)
               : "memory");
  return is_over != 0;
}
// 16-byte aligned addresses, a multiple of 16 bytes; completes on `bar`.
__device__ __forceinline__ void bulk_load(void* smem, const void* gmem, std::uint32_t bytes, std::uint64_t* bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(smem_address(smem)), "l"(gmem), "r"(bytes),
               "r"(smem_address(bar))
               : "memory");
}
__device__ __forceinline__ void bulk_store(void* gmem, const void* smem, std::uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(gmem), "r"(smem_address(smem)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until at most kPending of this thread's bulk stores still read shared memory.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// Waits until at most kPending of this thread's bulk stores are not yet written.
template <int kPending>
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}
// Waits until all bulk stores of this thread are written.
__device__ __forceinline__ void bulk_wait_all() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// Accesses of the copy engine and of ordinary instructions, in all memory, in order.
__device__ __forceinline__ void fence_async_proxy_all() { asm volatile("fence.proxy.async;" ::: "memory"); }
// Ordinary shared-memory accesses before it are seen by the copy engine after it, and the other way round.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void mbarrier_arrive(std::uint64_t* bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(bar)) : "memory");
}

// One of the barrier's expected arrivals, made when this thread's copies (copy_async_*) so far have landed.
__device__ __forceinline__ void copy_async_arrive(std::uint64_t* bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(smem_address(bar)) : "memory");
}

// --- clusters (sm_90) ---
__device__ __forceinline__ std::uint32_t cluster_rank() {
  std::uint32_t r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// The address of this CTA's shared memory location in CTA `rank` of the cluster.
__device__ __forceinline__ std::uint32_t map_shared(const void* p, std::uint32_t rank) {
  std::uint32_t r;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(smem_address(p)), "r"(rank));
  return r;
}
// Releases at CTA scope: enough to hand shared memory back after reading it. (Release at cluster scope costs a GPU-wide fence each time.)
__device__ __forceinline__ void mbarrier_arrive_remote(std::uint32_t mapped_bar) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(mapped_bar) : "memory");
}
// Four bytes into another CTA's shared memory; they count on that CTA's barrier when they are there.
__device__ __forceinline__ void store_remote(std::uint32_t mapped_p, std::uint32_t value, std::uint32_t mapped_bar) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(mapped_p), "r"(value), "r"(mapped_bar) : "memory");
}

// --- tensor copies (sm_90): a box of a tensor map to shared memory; coordinates innermost first, elements outside become 0 ---
__device__ __forceinline__ void prefetch_tensor_map(const void* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }
__device__ __forceinline__ void tensor_load_2d(void* smem, const void* map, int x, int y, std::uint64_t* bar) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(smem_address(smem)), "l"(map),
               "r"(x), "r"(y), "r"(smem_address(bar))
               : "memory");
}
__device__ __forceinline__ void tensor_load_3d(void* smem, const void* map, int x, int y, int z, std::uint64_t* bar) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(smem_address(smem)),
               "l"(map), "r"(x), "r"(y), "r"(z), "r"(smem_address(bar))
               : "memory");
}
// The same box to the same place in every CTA of `ctas` (a bit each); each counts on its own barrier.
__device__ __forceinline__ void tensor_load_2d_multicast(void* smem, const void* map, int x, int y, std::uint64_t* bar, std::uint16_t ctas) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(
                   smem_address(smem)),
               "l"(map), "r"(x), "r"(y), "r"(smem_address(bar)), "h"(ctas)
               : "memory");
}
__device__ __forceinline__ void tensor_load_3d_multicast(void* smem, const void* map, int x, int y, int z, std::uint64_t* bar, std::uint16_t ctas) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(
                   smem_address(smem)),
               "l"(map), "r"(x), "r"(y), "r"(z), "r"(smem_address(bar)), "h"(ctas)
               : "memory");
}

// A box from shared memory to a tensor, or added to it; what lies outside the tensor is left out. Ends with bulk_commit().
__device__ __forceinline__ void tensor_store_3d(const void* map, const void* smem, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map), "r"(smem_address(smem)), "r"(x), "r"(y), "r"(z)
               : "memory");
}
__device__ __forceinline__ void tensor_add_3d(const void* map, const void* smem, int x, int y, int z) {
  asm volatile("cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map), "r"(smem_address(smem)), "r"(x), "r"(y),
               "r"(z)
               : "memory");
}

// --- programmatic dependent launch (sm_90) ---
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_for_dependencies() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// --- warpgroups (sm_90a); the matrix instructions themselves are in wgmma.cuh ---
template <int kRegisters>
__device__ __forceinline__ void register_limit_raise() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void register_limit_lower() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving reads and writes of accumulators across it: put it beside wgmma_wait, which does not name them.
template <int kCount>
__device__ __forceinline__ void wgmma_keep(float (&acc)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(acc[i])::"memory");
}

// Counts among the barrier's threads without waiting.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// Four 8x8 matrices of 16-bit values from a warp's registers; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrix_x4(std::uint32_t smem, unsigned a, unsigned b, unsigned c, unsigned d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
// The inverse of store_matrix_x4.
__device__ __forceinline__ void load_matrix_x4(std::uint32_t smem, unsigned& a, unsigned& b, unsigned& c, unsigned& d) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(smem) : "memory");
}
// Four adds in global memory, 16-byte aligned.
__device__ __forceinline__ void red_add_v4(float* p, float4 v) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}
#endif

}  // namespace waybill::ptx
