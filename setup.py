"""Maps the top-level code folders to subpackages of `mixtron` and finds what is inside them."""

from setuptools import find_packages, setup

ROOTS = ("megatron_ext", "kernels", "data_prep", "launch", "slurm")
packages = ["mixtron"] + [
    f"mixtron.{name}"
    for root in ROOTS
    for name in [root, *(f"{root}.{sub}" for sub in find_packages(root))]
]
package_dir = {f"mixtron.{root}": root for root in ROOTS}
setup(
    packages=[p for p in packages if p != "mixtron"],
    package_dir=package_dir,
    package_data={"mixtron.slurm": ["*.j2"], "mixtron.launch.report": ["*.j2"]},
)
