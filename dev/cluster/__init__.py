"""A real one-node Kubernetes on a plain Linux machine, without a container engine: ``python -m dev.cluster``."""
