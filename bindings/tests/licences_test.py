# SPDX-License-Identifier: Apache-2.0
"""The licence texts of the libraries that a wheel bundles. Run with `python -m unittest licences_test`."""

import importlib.metadata
import pathlib
import shutil
import subprocess
import tempfile
import unittest

import waybill


class Licences(unittest.TestCase):
    SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "cmake" / "WaybillLicences.cmake"

    def find(self, library, folder):
        """Runs the build's search for a licence text."""
        script = pathlib.Path(folder) / "find.cmake"
        script.write_text(f'set(WAYBILL_LICENCE_DIR "{folder}")\ninclude({self.SCRIPT})\nwaybill_licence_of({library} text)\nmessage("${{text}}")\n')
        return subprocess.run(["cmake", "-P", str(script)], capture_output=True, text=True, check=False)

    @unittest.skipUnless(shutil.which("cmake") and SCRIPT.exists(), "needs cmake and the sources")
    def test_a_library_without_a_licence_text_stops_the_build(self):
        with tempfile.TemporaryDirectory() as folder:
            library = pathlib.Path(folder).resolve() / "libfmt.so.9.1.0"
            library.touch()
            missing = self.find(library, folder)
            self.assertNotEqual(missing.returncode, 0)
            self.assertIn("no licence text was found for", missing.stderr)
            text = library.parent / "fmt.txt"
            text.write_text("Copyright")
            found = self.find(library, folder)
            self.assertEqual((found.returncode, found.stderr.strip()), (0, str(text)))

    def test_each_bundled_library_has_its_licence(self):
        bundled = [path.name for path in (pathlib.Path(waybill.__file__).parent / "lib").glob("lib*.so*") if not path.name.startswith("libwaybill")]
        if not bundled:
            self.skipTest("not installed from a wheel that bundles libraries")
        texts = {file.name: file.read_text() for file in importlib.metadata.files("waybill") or [] if file.parent.name == "licenses"}
        for name in bundled:
            self.assertIn("Permission is hereby granted", texts[f"{name}.txt"])
            self.assertIn("opyright", texts[f"{name}.txt"])


if __name__ == "__main__":
    unittest.main()
