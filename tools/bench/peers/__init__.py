"""The libraries that our speed is compared with: how they get onto a machine, and a linear layer of each.

On a machine with a network, with the pip of any Python; then, where the GPU is, with the Python that has torch::

    python -m tools.bench.peers.download wheels --python 3.12      # what packages.txt names
    python -m tools.bench.peers.slim wheels --arch 90              # if 290 MiB are too many: 53 for one kind of GPU
    python -m tools.bench.peers.pieces split wheels pieces --mib 48
    python3 -m tools.bench.peers.pieces join pieces wheels         # pieces carried one by one, into one folder
    python3 -m tools.bench.peers.install wheels site
    PYTHONPATH=site:. python3 -m tools.bench linear --peers te,torchao
"""
