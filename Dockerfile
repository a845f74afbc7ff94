# syntax=docker/dockerfile:1
# The operator's image. No torch, no S3 client. From the repository's root:
#
#   docker build --build-arg COMMIT=$(git rev-parse HEAD) -t osprey-operator:0.1.0 .
#
# To pin the base by content as well, give its digest: --build-arg PYTHON=python@sha256:…, as printed by
# `docker buildx imagetools inspect python:3.11.14-slim-bookworm`.
ARG PYTHON=python:3.11.14-slim-bookworm

FROM ${PYTHON} AS build
WORKDIR /src
ENV UV_LINK_MODE=copy UV_PYTHON_DOWNLOADS=never
COPY requirements/uv.lock requirements/
RUN pip install --no-cache-dir --require-hashes --requirement requirements/uv.lock \
    && uv venv /opt/osprey
# The locked packages first: they change seldom, and our own code often.
COPY requirements/operator.lock requirements/
RUN --mount=type=cache,target=/root/.cache/uv \
    uv pip install --python /opt/osprey --require-hashes --compile-bytecode --requirement requirements/operator.lock
COPY requirements/dev.lock requirements/
COPY crds crds
COPY operator operator
RUN --mount=type=cache,target=/root/.cache/uv \
    for package in crds operator; do \
        uv build --wheel --require-hashes --build-constraints requirements/dev.lock --out-dir /wheels "$package" || exit 1; \
    done \
    && uv pip install --python /opt/osprey --no-deps --compile-bytecode /wheels/*.whl

FROM ${PYTHON}
ARG COMMIT=""
LABEL org.opencontainers.image.title="osprey-operator" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.revision="${COMMIT}"
COPY LICENSE /licenses/LICENSE
COPY --from=build /opt/osprey /opt/osprey
ENV PATH=/opt/osprey/bin:${PATH} PYTHONUNBUFFERED=1 OSPREY_COMMIT=${COMMIT}
# By number: Kubernetes cannot tell that a user with a name is not root.
USER 1000:1000
ENTRYPOINT ["python3", "-m", "osprey_operator"]
