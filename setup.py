"""What pyproject.toml cannot say: the folder `kernels/` is the package `minivllm.kernels`.

The list of packages is found rather than kept by hand. A checkout has the link `minivllm/kernels`, for imports from the
repository's root and for editable installs; a wheel gets the folder by package_dir, with or without the link.

kernels/ has no __init__.py on purpose: a regular package named `kernels` in the working directory would hide Hugging
Face's `kernels`, a namespace portion never does.
"""

from setuptools import find_namespace_packages, find_packages, setup

kernels = ["minivllm.kernels", *(f"minivllm.kernels.{name}" for name in find_namespace_packages("kernels"))]

setup(
    packages=find_packages(include=["minivllm", "minivllm.*"]) + kernels,
    package_dir={"minivllm.kernels": "kernels"},
)
