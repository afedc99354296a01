"""Metadata and dependencies; tool settings are in pyproject.toml, exact versions in requirements/."""

from setuptools import find_packages, setup

setup(
    name="megatron-lowprec",
    version="0.1.0",
    description="Published low-precision pretraining recipes for Megatron-core, with the same numerics on CPU and GPU",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11,<3.13",
    packages=find_packages(include=["megatron_lowprec", "megatron_lowprec.*"]),
    # Spelled out although it is the default: with it an editable install puts the repository's root on sys.path, so
    # that tests, tools and pretrain_gpt.py can be imported too.
    package_dir={"": "."},
    package_data={"megatron_lowprec.report": ["*.jinja"]},
    install_requires=[
        "torch>=2.11",
        "megatron-core>=0.16.1,<0.17",
        "numpy>=1.26",
        "scipy>=1.13",
        "Jinja2>=3.1",
        "pyyaml>=6.0",  # megatron-core needs it without saying so
        "psutil>=5.9",  # likewise: without it its checkpoint writer hangs
        "tokenizers>=0.20",
        "safetensors>=0.4",
        "tensorboard>=2.14",
        "matplotlib>=3.8",
        "rich>=13.0",
        # No triton: torch's CUDA builds bring the version they were made for, CPU builds run without.
    ],
    extras_require={
        "wandb": ["wandb>=0.17"],
        "datasets": ["datasets>=2.20"],  # whose streams can be resumed
        "zstd": ["zstandard>=0.22"],
        # For tools/harness; without its own extra for Hugging Face models, which asks for more than it needs here.
        "lm-eval": ["lm-eval==0.4.13", "transformers==5.23.0", "accelerate==1.15.0"],
        "te": ["transformer-engine[pytorch]==2.20.2"],
        "dev": [
            "pytest>=8.0",
            "pytest-xdist>=3.5",
            "ruff>=0.15",
            "mypy>=1.15",
            "types-PyYAML",
            "types-psutil",
            "zstandard>=0.22",
            # For the kernel tests, which run Triton's interpreter where there is no GPU.
            "triton>=3.6; platform_system == 'Linux'",
        ],
    },
    # Other distributions add recipes under the entry-point group `megatron_lowprec.recipes`: an entry names a
    # Recipe, or a function without arguments that returns one. Our own are in the registry and need no entry.
)
