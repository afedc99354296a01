# The package on PyTorch's image, with the image's own torch and Triton.
# Not built in CI (it needs the image, about 10 GB): after a change, build it and run `python -m pytest -m gpu` inside.
#
#   docker build -t megatron-lowprec .
#   docker run --gpus all --ipc=host --rm -it -v "$PWD/runs:/opt/megatron_lowprec/runs" megatron-lowprec \
#       torchrun --standalone --nproc-per-node=gpu pretrain_gpt.py --recipe mxfp4_rht_sr
#
# Another BASE needs a torch that pyproject.toml allows; the build ends with an error otherwise.
ARG BASE=pytorch/pytorch:2.11.0-cuda13.0-cudnn9-devel
FROM ${BASE}

# The image's Python is the system's, into which pip installs only if it is told to.
ENV PIP_BREAK_SYSTEM_PACKAGES=1
WORKDIR /opt/megatron_lowprec
COPY setup.py pyproject.toml LICENSE ./
COPY requirements requirements

# What the image has is held where it is: its torch and Triton are built for each other. Only the rest of our lock is
# installed, without dependencies, so that nothing pulls in another torch.
RUN python -c "import importlib.metadata as m; print(*sorted({d.name.lower().replace('_', '-') for d in m.distributions()}), sep='\n')" > /tmp/have \
    && sed -e ':a' -e '/\\$/N; s/\\\n//; ta' -e 's/#.*//' -e '/^ *$/d' requirements/cpu.txt \
       | awk -F '==' 'NR == FNR { have[$1] = 1; next } { name = tolower($1); gsub("_", "-", name) } !(name in have)' /tmp/have - > /tmp/need \
    && pip install --no-cache-dir --no-deps -r /tmp/need

COPY . .
RUN pip install --no-cache-dir --no-deps --no-build-isolation -e . \
    && python -c "import importlib.metadata as m; from packaging.requirements import Requirement; needs = [r for r in map(Requirement, m.requires('megatron-lowprec')) if r.name != 'megatron-lowprec' and (r.marker is None or any(r.marker.evaluate({'extra': e}) for e in ('train', 'lab')))]; wrong = [f'{r}, found {m.version(r.name)}' for r in needs if not r.specifier.contains(m.version(r.name), prereleases=True)]; assert not wrong, wrong" \
    && python -c "import torch, megatron.core, megatron_lowprec; assert torch.version.cuda, 'torch was replaced'"
CMD ["bash"]
