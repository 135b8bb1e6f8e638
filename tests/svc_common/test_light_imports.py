"""svc_common is part of the router, which has no tensor library."""

from __future__ import annotations

import subprocess
import sys

PROBE = """
import importlib, pkgutil, sys
import svc_common
for module in pkgutil.iter_modules(svc_common.__path__):
    importlib.import_module(f"svc_common.{module.name}")
print(sorted({"torch", "transformers", "numpy", "PIL"} & set(sys.modules)))
"""


def test_no_module_imports_a_tensor_library() -> None:
    paths = repr(sys.path)
    code = f"import sys\nsys.path[:] = {paths}\n{PROBE}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
