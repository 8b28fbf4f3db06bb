# SPDX-License-Identifier: Apache-2.0
"""The package on nothing but Python: ctypes layer, border checks, groups of ranks. Run with `python -m unittest core_test`."""

import array
import ctypes
import dataclasses
import math
import random
import shutil
import subprocess
import sys
import unittest

import waybill
from waybill import _abi, _core, _library, _tensor


def floats(*shape, values=None, dtype="f"):
    """A writable memoryview of a shape."""
    count = math.prod(shape)
    memory = memoryview(array.array(dtype, values if values is not None else [0] * count))
    return memory.cast("B").cast(dtype, shape=list(shape)) if count else _Empty(shape, dtype)


class _Empty:
    """memoryview cannot hold a shape with a zero."""

    def __init__(self, shape, dtype):
        self.shape, self.format = shape, dtype


def view(memory, name="x"):
    if isinstance(memory, _Empty):
        return _tensor.make(0, {"f": _abi.F32, "h": _abi.I16, "i": _abi.I32}[memory.format], memory.shape)
    names = [_abi.DTYPE_NAMES[i] for i in range(len(_abi.DTYPE_NAMES))]
    return _tensor.view(memory, name, dtypes=names, shape=[None] * len(memory.shape))


def reference_route(logits, K):
    """Softmax over all, top-k, renormalised; ties to the lower id."""
    ids = sorted(range(len(logits)), key=lambda e: (-logits[e], e))[:K]
    exps = [math.exp(logits[e] - logits[ids[0]]) for e in ids]
    return ids, [value / sum(exps) for value in exps]


class Workload(unittest.TestCase):
    def test_one_expert_is_in_every_row(self):
        ids, bounds = waybill.workload("W3", 40, 3, 16, P=4, seed=7)
        rows = ids.tolist()
        self.assertEqual((ids.shape, bounds), ((40, 3), [0, 10, 20, 30, 40]))
        self.assertEqual(len(set.intersection(*map(set, rows))), 1)
        self.assertTrue(all(len(set(row)) == 3 and min(row) >= 0 and max(row) < 16 for row in rows))
        self.assertEqual(rows, waybill.workload("W3", 40, 3, 16, P=1, seed=7)[0].tolist())
        self.assertNotEqual(rows, waybill.workload("W3", 40, 3, 16, P=1, seed=8)[0].tolist())

    def test_few_rows_brings_its_own_tokens(self):
        ids, bounds = waybill.workload("W9", 1000, 2, 10)
        counts = [sum(row.count(e) for row in ids.tolist()) for e in range(10)]
        self.assertTrue(all(1 <= count <= 2 for count in counts), counts)
        self.assertEqual(bounds[-1], len(ids))

    def test_wrong_names_and_sizes_are_refused(self):
        for name, T, K, E in [("W10", 4, 1, 2), ("W1", 4, 3, 2), ("W1", -1, 1, 2), ("W9", 4, 0, 2)]:
            with self.subTest(name=name, K=K), self.assertRaises(ValueError):
                waybill.workload(name, T, K, E)
        self.assertEqual(len(waybill.workload("W1", 0, 1, 2)[0]), 0)
        for wrong in [{"T": -1}, {"K": 0}, {"P": 0}, {"P": 2**31}, {"seed": -1}, {"seed": 2**64}, {"step": -1}, {"T": 2**40}]:
            [(what, value)] = wrong.items()
            with self.subTest(**wrong), self.assertRaisesRegex(ValueError, f"{what} = {value}"):
                waybill.workload("W1", **({"T": 4, "K": 1, "E": 2} | wrong))
        for wrong in [{"name": None}, {"T": 4.5}, {"P": "2"}]:
            with self.subTest(**wrong), self.assertRaises(TypeError):
                waybill.workload(**({"name": "W1", "T": 4, "K": 1, "E": 2} | wrong))


class Library(unittest.TestCase):
    def test_version_is_that_of_the_library(self):
        self.assertEqual(waybill.__version__, _library.library().wb_version().decode())
        self.assertIn(waybill.__version__, waybill.build_info())

    def test_every_struct_has_the_size_of_the_library(self):
        for name, struct in _abi.STRUCTS.items():
            self.assertEqual(_library.library().wb_struct_size(name.encode()), ctypes.sizeof(struct), name)
        self.assertEqual(_library.library().wb_struct_size(b"wb_nothing"), -1)

    def test_a_struct_larger_than_the_librarys_is_refused(self):
        class Larger(ctypes.Structure):
            _fields_ = [("bytes", ctypes.c_char * 4096)]

        lib = _library.library()
        original = _abi.STRUCTS["wb_moe_config"]
        try:
            _abi.STRUCTS["wb_moe_config"] = Larger
            with self.assertRaisesRegex(ImportError, "wb_moe_config of .* bytes, these bindings need 4096"):
                _library._check_structs(lib, "libwaybill.so")
        finally:
            _abi.STRUCTS["wb_moe_config"] = original

    def test_a_library_that_is_not_there_names_what_was_tried(self):
        code = "import waybill; waybill.build_info()"
        run = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env={"WAYBILL_LIBRARY": "/nowhere/libwaybill.so", "PYTHONPATH": ":".join(sys.path)}
        )
        self.assertIn("ImportError: waybill: libwaybill.so was not found", run.stderr)
        self.assertIn("/nowhere/libwaybill.so: no such file", run.stderr)

    def test_statuses_become_exceptions_with_the_librarys_text(self):
        with self.assertRaisesRegex(ValueError, "P is 0, allowed are 1 to 1024"):
            waybill.Group(0)
        with self.assertRaisesRegex(ValueError, "rank is 2, the group has ranks 0 to 1"):
            waybill.Group(2).fabric(2)

    def test_doctor_says_what_works(self):
        run = subprocess.run([sys.executable, "-m", "waybill"], capture_output=True, text=True)
        self.assertEqual((run.returncode, run.stderr), (2, "usage: python -m waybill doctor\n"))


class Border(unittest.TestCase):
    def test_wrong_type_dtype_shape_and_layout_have_one_clear_error_each(self):
        def check(array_, **kind):
            return _tensor.view(array_, "x", **{"dtypes": ["float32"], "shape": ["T", 4], **kind})

        good = floats(2, 4)
        self.assertEqual(check(good).shape, (2, 4))
        with self.assertRaisesRegex(TypeError, "x: list has neither __dlpack__ nor the buffer protocol"):
            check([1.0, 2.0])
        with self.assertRaisesRegex(ValueError, "x is float64, allowed are float32"):
            check(floats(2, 4, dtype="d"))
        with self.assertRaisesRegex(ValueError, r"x has shape \[2, 4\], needed is \[T, 5\]"):
            check(good, shape=["T", 5])
        with self.assertRaisesRegex(ValueError, r"x has shape \[2, 4\], needed is \[E\]"):
            check(good, shape=["E"])
        with self.assertRaisesRegex(ValueError, "x is read-only"):
            check(memoryview(bytes(32)).cast("f", shape=[2, 4]))
        with self.assertRaisesRegex(ValueError, "x .* is not contiguous"):
            check(memoryview(array.array("f", range(8)))[::2], shape=["T"])

    def test_arrays_on_a_device_are_refused(self):
        class OnGpu:
            def __dlpack__(self):
                raise AssertionError("must not be called")

            def __dlpack_device__(self):
                return (2, 0)

        with self.assertRaisesRegex(NotImplementedError, "x is on a device .* computes on the CPU only"):
            _tensor.view(OnGpu(), "x", dtypes=["float32"], shape=["T"])


class Configs(unittest.TestCase):
    def test_configs_are_constants_and_name_wrong_choices(self):
        config = waybill.RouterConfig(E=8, K=2)
        self.assertEqual(hash(config), hash(waybill.RouterConfig(E=8, K=2)))
        with self.assertRaisesRegex(ValueError, "score is 'softmin', allowed are softmax"):
            waybill.RouterConfig(E=8, K=2, score="softmin").struct()
        with self.assertRaisesRegex(ValueError, "E = 6 experts cannot be spread evenly over 4 ranks"):
            waybill.MoeConfig(H=4, F=8, router=waybill.RouterConfig(E=6, K=2)).shapes(4)

    def test_every_setting_reaches_the_library(self):
        config = waybill.MoeConfig(H=4, F=8, router=waybill.RouterConfig(E=8, K=2, score="sigmoid", num_groups=4, num_kept_groups=2, z_coefficient=0.5),
                                   activation="clamped_swiglu", activation_limit=3.0, recompute="layer", receive_factor=1.25, mode="captured")  # fmt: skip
        struct = config.struct()
        self.assertEqual(
            (struct.H, struct.F, struct.router.E, struct.router.score, struct.router.num_groups, struct.router.z_coefficient), (4, 8, 8, 2, 4, 0.5)
        )
        self.assertEqual((struct.activation, struct.activation_limit, struct.recompute, struct.receive_factor, struct.mode), (1, 3.0, 2, 1.25, 1))
        self.assertAlmostEqual(struct.activation_alpha, 1.702, places=3)  # the library's default stays


class Ops(unittest.TestCase):
    def test_router_agrees_with_its_definition_and_its_gradient_with_differences(self):
        draw = random.Random(7)
        T, E, K = 5, 6, 2
        logits = floats(T, E, values=[draw.gauss(0, 1) for _ in range(T * E)])
        ids, weights, counts = floats(T, K, dtype="h"), floats(T, K), floats(E, dtype="i")
        call = _core.RouterCall(waybill.RouterConfig(E=E, K=K, aux_coefficient=0.1, z_coefficient=0.01), view(logits))
        status = call.forward(view(ids), view(weights), view(counts))
        self.assertEqual(status.flags, 0)
        for t, row in enumerate(logits.tolist()):
            want_ids, want_weights = reference_route(row, K)
            self.assertEqual(ids.tolist()[t], want_ids)
            for k in range(K):
                self.assertAlmostEqual(weights[t, k], want_weights[k], places=6)
        self.assertEqual(sum(counts.tolist()), T * K)

        d_weights, d_logits = floats(T, K, values=[draw.gauss(0, 1) for _ in range(T * K)]), floats(T, E)
        call.backward(view(ids), view(weights), view(d_weights), view(d_logits))

        def objective():
            call.forward(view(ids), view(weights), None)
            return sum(call.losses(view(ids), view(weights))) + sum(weights[t, k] * d_weights[t, k] for t in range(T) for k in range(K))

        for t, e in ((0, 0), (1, ids[1, 0]), (4, 5), (2, ids[2, 1])):
            step, kept = 2e-3, logits[t, e]
            logits[t, e] = kept + step
            above = objective()
            logits[t, e] = kept - step
            below = objective()
            logits[t, e] = kept
            self.assertAlmostEqual(d_logits[t, e], (above - below) / (2 * step), places=3)

    def test_weights_of_losses_scale_values_and_gradients(self):
        draw = random.Random(8)
        T, E, K = 6, 5, 2
        logits = floats(T, E, values=[draw.gauss(0, 1) for _ in range(T * E)])
        ids, weights, counts, zeros = floats(T, K, dtype="h"), floats(T, K), floats(E, dtype="i"), floats(T, K)
        _core.RouterCall(waybill.RouterConfig(E=E, K=K), view(logits)).forward(view(ids), view(weights), view(counts))

        def results(aux, z, loss_weights):
            call = _core.RouterCall(waybill.RouterConfig(E=E, K=K, aux_coefficient=aux, z_coefficient=z), view(logits), aux_counts=view(counts), aux_tokens=T,
                                    loss_tokens=T)  # fmt: skip
            losses, d_logits = floats(3), floats(T, E)
            factors = None if loss_weights is None else view(floats(3, values=loss_weights))
            call.losses_weighted(view(ids), view(weights), factors, view(losses))
            call.backward(view(ids), view(weights), view(zeros), view(d_logits), factors)
            return losses.tolist() + sum(d_logits.tolist(), [])

        want, got = results(0.1, 0.03, None), results(0.2, 0.01, [0.5, 7.0, 3.0])
        for a, b in zip(want, got):
            self.assertAlmostEqual(a, b, places=7)
        self.assertGreater(max(map(abs, want[3:])), 1e-3)

    def test_group_rows_writes_offsets_and_clears_what_no_group_has(self):
        sizes, offsets, rows = floats(3, dtype="i", values=[2, 0, 3]), floats(4, dtype="i"), floats(6, 2, values=[1] * 12)
        _core.group_rows(view(offsets), view(rows), 6, view(sizes))
        self.assertEqual(offsets.tolist(), [0, 2, 2, 5])
        self.assertEqual(rows.tolist(), [[1, 1]] * 5 + [[0, 0]])
        for bad in ([2, -1, 3], [4, 0, 3]):
            kept = offsets.tolist()
            with self.assertRaisesRegex(ValueError, r"group_sizes\[[12]\] = (-1|3) is negative or passes the 6 rows"):
                _core.group_rows(view(offsets), view(rows), 6, view(floats(3, dtype="i", values=bad)))
            self.assertEqual(offsets.tolist(), kept)
        with self.assertRaisesRegex(ValueError, "group_sizes must be i32 \\[3\\]"):
            _core.group_rows(view(offsets), None, 6, view(floats(2, dtype="i")))

    def test_grouped_gemm_with_an_empty_group_and_rows_of_no_group(self):
        a, w = floats(4, 2, values=[1, 2, 3, 4, 5, 6, 7, 8]), floats(3, 1, 2, values=[1, 1, 9, 9, 1, -1])
        offsets, y = floats(4, dtype="i", values=[0, 2, 2, 3]), floats(4, 1, values=[-1, -1, -1, -1])
        _core.grouped_gemm("forward", view(a), view(w), view(offsets), view(y))
        self.assertEqual(y.tolist(), [[3], [7], [-1], [-1]])  # 5 - 6 = -1; the last row belongs to nobody and is not written
        dw = floats(3, 1, 2, values=[7] * 6)
        dy = floats(4, 1, values=[1, 1, 1, 1])
        _core.grouped_gemm("wgrad", view(a), view(dw), view(offsets), view(dy))
        self.assertEqual(dw.tolist(), [[[4, 6]], [[0, 0]], [[5, 6]]])

    def test_mx_blocks_there_and_back(self):
        x = floats(2, 32, values=[i % 8 - 4 for i in range(64)])
        codes, scales, back = floats(2, 32, dtype="B"), floats(2, 1, dtype="B"), floats(2, 32)
        config = _core.quant_config()
        codes_view = view(codes)
        codes_view.struct.dtype = _abi.F8E4M3
        _core.quantize(config, view(x), codes_view, view(scales))
        self.assertEqual(scales.tolist(), [[121], [121]])
        _core.dequantize(config, codes_view, view(scales), view(back))
        self.assertEqual(back.tolist(), x.tolist())

    def test_an_activation_is_quantised_from_its_inputs(self):
        h, weight = floats(2, 2, values=[0, 3, 1000, 2]), floats(2, values=[1, 0.25])  # silu(0) * 3, and silu(1000) * 2 weighted: 0 and 500
        codes, scales = floats(2, 1, dtype="B"), floats(2, 1)
        codes_view = view(codes)
        codes_view.struct.dtype = _abi.F8E4M3
        _core.quantize_activated(_core.quant_config(scale=1, block_columns=128), view(h), codes_view, view(scales), weight=view(weight))
        self.assertEqual(codes.tolist(), [[0], [0x78]])  # 500 / 2 lies between 240 and 256
        self.assertEqual(scales.tolist()[1], [2.0])
        with self.assertRaisesRegex(ValueError, "activation"):
            _core.quantize_activated(_core.quant_config(), view(h), codes_view, view(scales), activation=7)

    def test_expert_bias_moves_towards_balance(self):
        bias, counts = array.array("f", [0, 0, 0, 0]), array.array("q", [4, 0, 2, 2])
        waybill.update_expert_bias(bias, counts, 0.5)
        self.assertEqual(bias.tolist(), [-0.5, 0.5, 0, 0])
        with self.assertRaisesRegex(ValueError, "bias is float64"):
            waybill.update_expert_bias(array.array("d", [0] * 4), counts, 0.5)


def exchange_round_trip(fabric, T_of_rank):
    """Identity experts: combine gives each token times the sum of its weights."""
    T, H, E, K = T_of_rank(fabric.rank), 3, 4, 2
    x = floats(T, H, values=[fabric.rank * 100 + i for i in range(T * H)])
    ids = floats(T, K, dtype="h", values=[(t + fabric.rank + k) % E for t in range(T) for k in range(K)])
    weights = floats(T, K, values=[0.25 + k for t in range(T) for k in range(K)])
    exchange = _core.Exchange(fabric, H=H, E=E, K=K)
    plan = exchange.plan(view(ids), view(weights))
    rows = exchange.dispatch(plan, view(x))
    info = plan.info()
    slots, z, out = floats(info.S_padded, H), floats(info.R, H), floats(T, H)
    rows_view = _tensor.View(rows, plan)
    plan.permute(rows_view, view(slots))
    plan.unpermute(view(slots), view(z), weighted=True)
    exchange.combine(plan, view(z), view(out))
    if T:
        return all(abs(out[t, h] - 1.5 * x[t, h]) < 1e-4 for t in range(T) for h in range(H))
    return True


class Groups(unittest.TestCase):
    def test_exchange_of_threads_is_exact_for_even_ragged_and_empty_ranks(self):
        for P in (1, 2, 4):
            for T_of_rank in (lambda rank: 4, lambda rank: rank, lambda rank: 0):
                self.assertEqual(waybill.Group(P).run(lambda fabric: exchange_round_trip(fabric, T_of_rank)), [True] * P)

    def test_a_rank_that_raises_wakes_the_others_and_is_raised(self):
        def body(fabric):
            if fabric.rank == 1:
                raise KeyError("lost")
            fabric.barrier()

        with self.assertRaisesRegex(Exception, "lost"):
            waybill.Group(3).run(body)

    def test_a_transport_of_the_caller_carries_the_exchange_and_its_failure(self):
        import threading

        P = 2
        meeting, sent = threading.Barrier(P), [None] * P

        def all_to_all_of(rank, cut=False):
            def all_to_all(send, send_bytes, receive, receive_bytes):
                if cut:
                    raise OSError("cable cut")
                sent[rank] = (bytes(send), list(send_bytes))
                meeting.wait(20)
                position = 0
                for p, size in enumerate(receive_bytes):
                    data, sizes = sent[p]
                    begin = sum(sizes[:rank])
                    receive[position : position + size] = data[begin : begin + size]
                    position += size
                meeting.wait(20)

            return all_to_all

        results = [None] * P

        def one(rank):
            fabric = waybill.transport_fabric(all_to_all_of(rank), rank, P)
            results[rank] = (exchange_round_trip(fabric, lambda r: 3 + r), fabric.all_reduce(rank + 1))

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(P)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(results, [(True, 3)] * P)
        with self.assertRaisesRegex(RuntimeError, "the caller's transport failed: OSError: cable cut"):
            waybill.transport_fabric(all_to_all_of(0, cut=True), 0, P).barrier()

    def test_configs_that_differ_between_ranks_are_named_on_every_rank(self):
        def body(fabric):
            with self.assertRaisesRegex(ValueError, "H"):
                _core.Exchange(fabric, H=4 + fabric.rank, E=4, K=2)
            return True

        self.assertEqual(waybill.Group(2).run(body), [True, True])


class DeviceMoe(unittest.TestCase):
    """What needs no GPU."""

    CONFIG = waybill.MoeConfig(H=64, F=48, router=waybill.RouterConfig(E=8, K=2), recipe="bf16", T_max=32)

    @unittest.skipUnless(_library.has_cuda(), "libwaybill.so was built without CUDA")
    def test_saved_bytes_follow_from_the_config(self):
        from waybill import _device

        kinds = ("none", "activation", "layer")
        # a [S, F], and h [S, 2F], all bf16; over several ranks the rows that came, too: alone a rank reads x itself. Parts are aligned to 256 bytes.
        for P, slots, rows in ((1, 64, 0), (2, 128, 64)):
            sizes = {recompute: _device.saved_bytes(dataclasses.replace(self.CONFIG, recompute=recompute).struct(), P) for recompute in kinds}
            self.assertEqual(sizes["none"] - sizes["activation"], slots * 48 * 2)
            kept = slots * 96 * 2 + rows * 64 * 2
            self.assertTrue(kept <= sizes["activation"] - sizes["layer"] < kept + 2048, sizes)

    @unittest.skipUnless(_library.has_cuda(), "libwaybill.so was built without CUDA")
    def test_what_the_layer_on_gpus_lacks_is_refused_by_name(self):
        from waybill import _device

        with self.assertRaisesRegex(NotImplementedError, "the MoE layer on GPUs does not do"):
            _device.saved_bytes(dataclasses.replace(self.CONFIG, recipe="fp32").struct(), 1)
        with self.assertRaisesRegex(ValueError, "needs T_max, the most tokens of a call, got 0"):
            _device.saved_bytes(dataclasses.replace(self.CONFIG, T_max=0).struct(), 1)
        with self.assertRaisesRegex(ValueError, "multiples of 8, got H = 60"):
            _device.saved_bytes(dataclasses.replace(self.CONFIG, H=60).struct(), 1)

    def test_configs_that_differ_are_named_with_setting_rank_and_values(self):
        mine, other = self.CONFIG.struct(), dataclasses.replace(self.CONFIG, router=waybill.RouterConfig(E=8, K=2, z_coefficient=0.5)).struct()
        _core.name_difference(_abi.MoeConfig, [bytes(mine), bytes(mine)])
        with self.assertRaisesRegex(ValueError, r"MoE configs differ between ranks: rank 0 has router.z_coefficient = 0.0, rank 2 has 0.5"):
            _core.name_difference(_abi.MoeConfig, [bytes(mine), bytes(mine), bytes(other)])
        with self.assertRaisesRegex(ValueError, r"exchange configs differ between ranks: rank 0 has H = 8, rank 1 has 16"):
            _core.name_difference(_abi.ExchangeConfig, [bytes(_abi.ExchangeConfig(H=H)) for H in (8, 16)])
        with self.assertRaisesRegex(ValueError, "rank 1 has another version of Waybill: its MoE config has 8 bytes"):
            _core.name_difference(_abi.MoeConfig, [bytes(mine), bytes(8)])

    def test_the_most_tokens_are_those_of_the_call_where_the_config_names_none(self):
        from waybill import _device

        self.assertEqual(_device.settings(dataclasses.replace(self.CONFIG, T_max=0), 4).T_max, 4)
        self.assertEqual(_device.settings(self.CONFIG, 4).T_max, 32)

    def test_each_weight_of_a_backward_has_its_loss(self):
        from waybill import _device

        aux = dataclasses.replace(self.CONFIG, router=waybill.RouterConfig(E=8, K=2, aux_coefficient=0.1))
        self.assertEqual(_device.loss_indices(aux), (0, 1, 3))
        self.assertEqual(_device.loss_indices(dataclasses.replace(self.CONFIG, global_coefficient=0.1)), (2, 1, 3))
        self.assertEqual(_device.loss_indices(dataclasses.replace(aux, global_coefficient=0.1))[:4], (0, 1, 3, 2))

    @unittest.skipUnless(_library.has_cuda(), "libwaybill.so was built without CUDA")
    @unittest.skipIf(shutil.which("nvidia-smi"), "this machine may have a GPU")
    def test_a_missing_gpu_is_named(self):
        from waybill import _device

        with self.assertRaisesRegex(NotImplementedError, "this machine has no NVIDIA driver|no GPU can be used"):
            _device.Layer(self.CONFIG.struct(), 0)

    @unittest.skipIf(_library.has_cuda(), "libwaybill.so was built with CUDA")
    def test_a_library_without_cuda_says_so(self):
        from waybill import _device

        with self.assertRaisesRegex(NotImplementedError, "this library computes on the CPU only"):
            _device.saved_bytes(self.CONFIG.struct(), 1)

    def test_a_group_of_processes_needs_eager_loading(self):
        from unittest import mock

        from waybill import _device

        with mock.patch.dict("os.environ", {"CUDA_MODULE_LOADING": "LAZY"}), self.assertRaisesRegex(RuntimeError, "CUDA_MODULE_LOADING=EAGER"):
            _device.check_environment()


if __name__ == "__main__":
    unittest.main()
