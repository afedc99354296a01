"""What pyproject.toml cannot hold; the metadata is there, exact versions are in requirements/."""

from setuptools import setup

# Spelled out although it is the default: with it an editable install puts the repository's root on sys.path, so that
# tests, tools and pretrain_gpt.py can be imported as well.
setup(package_dir={"": "."})
