# SPDX-License-Identifier: Apache-2.0
"""Tests of the house around the engine: configuring, installing, the archive, scripts. Run by ctest, one test a name:
house_test.py SOURCE BUILD CMAKE TestClass.test_name"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

SOURCE = BUILD = CMAKE = None


def run(*command, **options):
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, errors="replace", **options)


class HouseTest(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="waybill_house_"))
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)

    def configure(self, *options):
        """Output of a configuration that must fail."""
        result = run(CMAKE, "--fresh", "-S", SOURCE, "-B", self.folder / "build", "-G", "Ninja", "-DWAYBILL_CUDA=OFF", *options)
        self.assertNotEqual(result.returncode, 0, result.stdout)
        return re.sub(r"\s+", " ", result.stdout + result.stderr)

    def needed_libraries(self, path):
        return re.findall(r"\(NEEDED\).*\[(.*)\]", run("readelf", "-d", path).stdout)


class Configure(HouseTest):
    def test_F29_names_a_missing_dependency(self):
        for package, debian in (("fmt", "libfmt-dev"), ("CLI11", "libcli11-dev"), ("tomlplusplus", "libtomlplusplus-dev")):
            output = self.configure(f"-DCMAKE_DISABLE_FIND_PACKAGE_{package}=ON")
            self.assertRegex(output, rf"{package} +is missing: needed for")
            self.assertIn(debian, output)

    def test_F29_reports_libraries_without_headers(self):
        decoy = self.folder / "decoy"
        (decoy / "lib").mkdir(parents=True)
        (decoy / "lib" / "libfmt.so").write_bytes(b"")
        self.assertRegex(self.configure(f"-DCMAKE_PREFIX_PATH={decoy}"), r"fmt in \S+decoy is incomplete: .*libfmt\.so but not include/fmt/format\.h")

    def test_F29_reports_a_package_file_whose_headers_are_gone(self):
        decoy = self.folder / "decoy"
        decoy.mkdir()
        (decoy / "fmt-config.cmake").write_text(
            "add_library(fmt::fmt INTERFACE IMPORTED)\n"
            f'set_target_properties(fmt::fmt PROPERTIES INTERFACE_INCLUDE_DIRECTORIES "{decoy}/include")\n', encoding="utf-8")  # fmt: skip
        self.assertRegex(self.configure(f"-Dfmt_DIR={decoy}"), r"fmt is incomplete: .*fmt/format\.h is not in")

    def test_F29_cuda_on_without_nvcc_is_refused(self):
        environment = {**os.environ, "PATH": "/usr/bin:/bin"}
        environment.pop("CUDACXX", None)
        result = run(CMAKE, "-S", SOURCE, "-B", self.folder / "build", "-G", "Ninja", "-DWAYBILL_CUDA=ON", "-DCMAKE_CUDA_COMPILER=", env=environment)
        self.assertNotEqual(result.returncode, 0)
        self.assertRegex(re.sub(r"\s+", " ", result.stderr), r"WAYBILL_CUDA=ON but no nvcc was found")


class Install(HouseTest):
    def test_F29_installed_package_builds_and_runs_a_c_and_a_cpp_program(self):
        prefix = self.folder / "prefix"
        result = run(CMAKE, "--install", BUILD, "--prefix", prefix)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        project, build = pathlib.Path(SOURCE) / "tests/tools/install_test", self.folder / "use"
        result = run(CMAKE, "-S", project, "-B", build, "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={prefix}")
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        result = run(CMAKE, "--build", build)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        for program in ("use_c", "use_cpp"):
            result = run(build / program)
            self.assertEqual(result.returncode, 0, program + result.stdout + result.stderr)
        result = run(prefix / "bin" / "waybill", "--version")
        self.assertRegex(result.stdout, r"\d+\.\d+\.\d+")
        self.assertTrue((prefix / "share/waybill/configs/demo.toml").is_file())
        self.assertTrue((prefix / "include/waybill/fabric.h").is_file())
        for header in ("mpi_fabric.h", "baselines.h"):  # their symbols are not in libwaybill.so
            self.assertFalse((prefix / "include/waybill" / header).exists(), header)

    def test_F29_libraries_need_no_mpi_or_network_library(self):
        libraries = [pathlib.Path(BUILD) / "src/capi/libwaybill.so"]
        # The command may carry the MPI engine, where the build has that feature.
        if "WAYBILL_HAS_MPI:INTERNAL=ON" not in (pathlib.Path(BUILD) / "CMakeCache.txt").read_text(encoding="utf-8"):
            libraries.append(pathlib.Path(BUILD) / "tools/waybill/waybill")
        for path in libraries:
            needed = self.needed_libraries(path)
            self.assertTrue(any(name.startswith("libc.so") for name in needed), needed)
            for name in needed:
                self.assertNotRegex(name, r"mpi|nvshmem|ucx|ibverbs|fabric|nccl|cuda", f"{path} needs {name}")


class Archive(HouseTest):
    def test_F29_release_archive_builds_on_its_own(self):
        if not (pathlib.Path(SOURCE) / ".git").exists():
            self.skipTest("not a git checkout: this is the archive")
        archive = self.folder / "waybill.tar"
        result = run("git", "-C", SOURCE, "archive", "--format=tar", "--prefix=waybill/", f"--output={archive}", "HEAD")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(run("tar", "-xf", archive, "-C", self.folder).returncode, 0)
        source, build = self.folder / "waybill", self.folder / "build"
        options = ("-DWAYBILL_CUDA=OFF", "-DWAYBILL_MPI=OFF", "-DCMAKE_BUILD_TYPE=None", "-DCMAKE_CXX_FLAGS=-O0")
        result = run(CMAKE, "-S", source, "-B", build, "-G", "Ninja", *options)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        result = run(CMAKE, "--build", build, "--target", "waybill")
        self.assertEqual(result.returncode, 0, result.stdout[-4000:] + result.stderr)
        result = run(build / "tools/waybill/waybill", "inspect", "model", source / "configs/demo.toml")
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)


class Scripts(HouseTest):
    def test_demo_refuses_a_text_that_is_not_there(self):
        result = run("bash", pathlib.Path(SOURCE) / "scripts/demo.sh", "--text", self.folder / "missing.txt", cwd=self.folder)
        self.assertEqual(result.returncode, 2)
        self.assertIn("no such file or folder", result.stderr)

    def test_the_page_of_config_keys_is_what_the_command_prints(self):
        printed = run(pathlib.Path(BUILD) / "tools/waybill/waybill", "train", "--list-keys").stdout
        page = (pathlib.Path(SOURCE) / "docs/config.md").read_text(encoding="utf-8")
        self.assertIn("train.global_batch", printed)
        self.assertEqual(page.split("```\n")[1], printed, "renew docs/config.md by `waybill train --list-keys`")

    def test_unknown_options_are_refused(self):
        for script in ("demo.sh", "test.sh", "sanitize.sh"):
            result = run("bash", pathlib.Path(SOURCE) / "scripts" / script, "--no-such-option", cwd=self.folder)
            self.assertEqual(result.returncode, 2, script)
            self.assertIn("--no-such-option", result.stderr)

    def test_skipped_gpu_tests_are_counted_with_their_reasons(self):
        log = self.folder / "log"
        log.write_text(
            "[       OK ] A.Runs (3 ms)\n/x/a.cc:13: Skipped\nneeds 2 GPUs; \"1\"\n\n[  SKIPPED ] A.Waits (0 ms)\n"
            "/x/a.cc:99: Skipped\nneeds 2 GPUs; \"1\"\n\n[  SKIPPED ] B/Q.Waits/2 (0 ms)\n[  SKIPPED ] 2 tests, listed below:\n"
            "[  SKIPPED ] A.Waits\n[  SKIPPED ] B/Q.Waits/2\n"
        )
        script = pathlib.Path(SOURCE) / "scripts/gtest_skips.py"
        self.assertEqual(run(sys.executable, script, log).stdout, ", 2 skipped: needs 2 GPUs; 1")
        log.write_text("s.s. [100%]\nSKIPPED [2] cuda/ep_cuda_test.py:33: needs 2 GPUs, there are 1\n2 passed, 2 skipped in 77.05s\n")
        self.assertEqual(run(sys.executable, script, log).stdout, ", 2 skipped: needs 2 GPUs, there are 1")
        log.write_text("[       OK ] A.Runs (3 ms)\n")
        self.assertEqual(run(sys.executable, script, log).stdout, "")

    def test_performance_page_sums_up_its_results(self):
        """scripts/render_performance.py in a tree of its own, with one result of the router."""
        tree = self.folder / "tree"
        for name in ("scripts", "docs/figures", "docs/perf", "bench/results/gpu"):
            (tree / name).mkdir(parents=True)
        for name in ("render_performance.py", "speed_figure.py", "cuda_sources_hash.py"):
            shutil.copy(pathlib.Path(SOURCE) / "scripts" / name, tree / "scripts")
        row = {"op": "o", "case": "c", "variant": "", "unit": "us", "spread": 0.1, "floor": None, "target": None, "peers": {}, "checked": True}
        turns = {"torch": 9.0, "waybill in turns with it": 8.0}  # shared its clock: counts in place of the row's own 12
        rows = [row | {"value": 10.0, "target": 10.0}, row | {"value": 10.4, "target": 10.0}, row | {"value": 12.0, "target": 11.0, "peers": turns},
                row | {"value": 2.0, "peers": {"torch": 1.0}}, row | {"value": 1.0, "peers": {"torch": 1.5, "other": 0.5}}]  # fmt: skip
        header = {"area": "router", "gpu": "A GPU", "date": "today", "commit": "c", "cuda_sources": "of another day", "driver": "d", "cuda": "13", "torch": "",
                  "clocks": {"sm_mhz": 1}, "method": "m", "checks": {"one": "passed", "two": "passed, 3 skipped: why", "fabric": "failed"}}  # fmt: skip
        (tree / "bench/results/gpu/router.json").write_text(json.dumps({"header": header, "records": rows}), encoding="utf-8")
        script = tree / "scripts/render_performance.py"
        self.assertEqual(run(sys.executable, script, "--check").returncode, 1)
        self.assertEqual(run(sys.executable, script).returncode, 0)
        page = (tree / "docs/performance.md").read_text(encoding="utf-8")
        cells = "| [router](#router-on-a-gpu) | A GPU | today | 5 | 1 of 3; 1 within 5% | 2 of 3 | failed elsewhere, older than the sources |"
        self.assertIn(cells, page)
        self.assertIn("Checks of the same run: passed: one; two passed, 3 skipped: why; fabric failed.", page)
        self.assertEqual(run(sys.executable, script, "--check").returncode, 0)
        log = tree / "docs/perf/router.md"
        log.write_text("head\n<!-- recorded: by scripts/render_performance.py -->\nold\n<!-- /recorded -->\ntail\n", encoding="utf-8")
        self.assertEqual(run(sys.executable, script, "--check").returncode, 1)
        self.assertEqual(run(sys.executable, script).returncode, 0)
        parts = log.read_text(encoding="utf-8").splitlines()
        self.assertEqual([parts[0], parts[-1]], ["head", "tail"])
        self.assertNotIn("old", parts)
        self.assertIn(cells.replace("](#", "](../performance.md#"), parts)
        figure = tree / "docs/figures/speed.svg"
        self.assertFalse(figure.exists())  # no results of the MoE layer
        step = {"op": "moe fwd+bwd", "case": "name T1", "unit": "us", "load": "natural", "ranks": 1, "gpus": 1, "checked": True, "spread": 0, "tflops": 1,
                "peak_bytes": 0, "host_waits": 0, "shares": {}, "iterations": 1, "evidence": "MoE module", "target": None, "peers": {}}  # fmt: skip
        times = {"torch grouped": 20000, "dense-map captured": 15000, "sparse captured": 8000}
        records = [step | {"variant": variant, "value": us} for variant, us in times.items()]
        (tree / "bench/results/gpu/moe.json").write_text(json.dumps({"header": header | {"area": "moe"}, "records": records}), encoding="utf-8")
        result = run(sys.executable, script)
        self.assertEqual(result.returncode, 0, result.stderr)
        drawn = figure.read_text(encoding="utf-8")
        for part in ("20.00 ms<", "15.00 ms<", "8.00 ms (2.50 times as fast)", 'width="172.0"', "does not count, older than the sources (failed: fabric)"):
            self.assertIn(part, drawn)
        figure.write_text("another", encoding="utf-8")
        self.assertEqual(run(sys.executable, script, "--check").returncode, 1)

    def test_cuda_compiles_fail_on_spills_and_on_warnings_of_lost_wgmma(self):
        """cmake/check_ptxas.py in front of a compiler that prints what ptxas prints."""

        def compile_with(report, source="__global__ void hot() {}\n"):
            (self.folder / "k.cu").write_text(source)
            (self.folder / "report").write_text(report)
            compiler = self.folder / "nvcc"
            compiler.write_text(f"#!/bin/sh\ncat {self.folder}/report >&2\ntouch {self.folder}/k.o\n")
            compiler.chmod(0o755)
            result = run(sys.executable, pathlib.Path(SOURCE) / "cmake/check_ptxas.py", compiler, "-c", self.folder / "k.cu", "-o", self.folder / "k.o")
            return result.returncode, result.stderr, (self.folder / "k.o").exists()

        def entry(arch, spills):
            return (
                f"ptxas info    : Compiling entry function 'hot' for '{arch}'\n"
                "ptxas info    : Function properties for hot\n"
                f"    8 bytes stack frame, {spills} bytes spill stores, {spills} bytes spill loads\n"
                "ptxas info    : Used 64 registers\n"
            )

        self.assertEqual(compile_with(entry("sm_90a", 0)), (0, "", True))
        code, text, made = compile_with(entry("sm_90a", 12))
        self.assertEqual((code, made), (1, False))
        self.assertIn("hot: 12 bytes spill stores", text)
        self.assertEqual(compile_with(entry("sm_80", 12) + entry("sm_90a", 0))[0], 0)  # no speed claim there
        self.assertEqual(compile_with(entry("sm_90a", 12), "// ptxas: may spill hot: a test\n")[0], 0)
        for warning in ("C7508", "C7510"):
            code, text, made = compile_with(entry("sm_90a", 0) + f"ptxas warning : ({warning}) Potential Performance Loss\n")
            self.assertEqual((code, made), (1, False))
            self.assertIn(warning, text)

    def test_layer_check_finds_an_upward_include(self):
        tree = self.folder / "tree"
        for name in ("include/waybill", "src/core", "src/moe", "scripts", "tools", "bench", "tests", "bindings"):
            (tree / name).mkdir(parents=True)
        shutil.copy(pathlib.Path(SOURCE) / "scripts/check_layers.py", tree / "scripts")
        for header in (pathlib.Path(SOURCE) / "include/waybill").glob("*.h"):
            (tree / "include/waybill" / header.name).write_text("#pragma once\n", encoding="utf-8")
        bad = tree / "src/core/bad.cc"
        bad.write_text('#include "waybill/error.h"\n#include "waybill/moe.h"\n#include <cuda_runtime.h>\n#include <torch/torch.h>\n', encoding="utf-8")
        result = run(sys.executable, tree / "scripts/check_layers.py")
        self.assertEqual(result.returncode, 1)
        for text in ("src/core/bad.cc:2: core includes waybill/moe.h of moe", "CUDA header cuda_runtime.h", "framework header torch/torch.h"):
            self.assertIn(text, result.stdout)
        bad.unlink()
        (tree / "src/core/good.cc").write_text('#include "waybill/error.h"\n', encoding="utf-8")
        result = run(sys.executable, tree / "scripts/check_layers.py")
        self.assertEqual(result.returncode, 0, result.stdout)
        (tree / "include/waybill/route.h").unlink()
        result = run(sys.executable, tree / "scripts/check_layers.py")
        self.assertEqual(result.returncode, 1)
        self.assertIn("include/waybill/route.h: no such file", result.stdout)


if __name__ == "__main__":
    SOURCE, BUILD, CMAKE, *names = sys.argv[1:]
    suite = unittest.defaultTestLoader.loadTestsFromNames(names, module=sys.modules["__main__"])
    outcome = unittest.TextTestRunner(stream=sys.stdout, verbosity=2).run(suite)
    if outcome.skipped and not outcome.failures and not outcome.errors:
        sys.exit(77)
    sys.exit(0 if outcome.wasSuccessful() and outcome.testsRun == len(names) else 1)
