"""Builds the kernels; everything else stands in pyproject.toml."""

import sys
from pathlib import Path

from setuptools import Extension, setup

sources = ["mpiquant/_kernels.pyx", *sorted(map(str, Path("csrc").glob("*.c")))]
headers = sorted(str(p) for pattern in ("*.h", "*.inc") for p in Path("csrc").glob(pattern))

# No -ffast-math and no contraction: every instruction set must give the same bits.
flags = [] if sys.platform == "win32" else ["-std=c11", "-O3", "-ffp-contract=off", "-Wno-psabi"]

setup(
    ext_modules=[
        Extension(
            "mpiquant._kernels",
            sources,
            include_dirs=["csrc"],
            depends=headers,
            extra_compile_args=flags,
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            py_limited_api=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
