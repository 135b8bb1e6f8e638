# Images of day0: docker build --target router|vision|llm|llm-cuda -t day0-TARGET .
# BASE is any Debian bookworm, also one made by debootstrap; give it with a digest to pin every byte.
ARG BASE=docker.io/library/debian:12.11-slim

FROM ${BASE} AS python
RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates python3 python3-venv \
 && rm -rf /var/lib/apt/lists/* \
 && groupadd --gid 10001 day0 \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin day0
# The root file system is read-only in the cluster: whatever is written goes to /tmp.
ENV PATH=/opt/day0/bin:$PATH \
    HOME=/tmp \
    HF_HOME=/tmp/huggingface \
    HF_HUB_OFFLINE=1 \
    TRITON_CACHE_DIR=/tmp/triton \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1

FROM python AS build
COPY constraints.txt /src/constraints.txt
RUN python3 -m venv /opt/day0 \
 && python -m pip install --no-cache-dir -c /src/constraints.txt pip setuptools
COPY pyproject.toml README.md LICENSE /src/
COPY protos /src/protos
COPY svc_common /src/svc_common
COPY router_svc /src/router_svc
COPY vision_svc /src/vision_svc
COPY llm_svc /src/llm_svc
COPY kernels /src/kernels
COPY day0 /src/day0
RUN python -m pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels /src

FROM build AS build-router
RUN python -m pip install --no-cache-dir -c /src/constraints.txt "$(ls /wheels/day0-*.whl)[router,cluster]"

# PyPI's torch for Linux brings CUDA along; this index has the CPU build of the same version.
FROM build AS build-vision
RUN python -m pip install --no-cache-dir -c /src/constraints.txt \
      --extra-index-url https://download.pytorch.org/whl/cpu "$(ls /wheels/day0-*.whl)[vision]"

FROM build AS build-llm
RUN python -m pip install --no-cache-dir -c /src/constraints.txt \
      --extra-index-url https://download.pytorch.org/whl/cpu "$(ls /wheels/day0-*.whl)[llm,cluster]"

FROM build AS build-llm-cuda
RUN python -m pip install --no-cache-dir -c /src/constraints.txt "$(ls /wheels/day0-*.whl)[llm,cuda,cluster]"

# The services set their own handlers for SIGTERM, so each may be process 1.
FROM python AS router
COPY --from=build-router /opt/day0 /opt/day0
USER 10001:10001
EXPOSE 50051 50052 9090
CMD ["python", "-m", "router_svc"]

FROM python AS vision
COPY --from=build-vision /opt/day0 /opt/day0
USER 10001:10001
EXPOSE 50051 50052 9090
CMD ["python", "-m", "vision_svc"]

FROM python AS llm
COPY --from=build-llm /opt/day0 /opt/day0
USER 10001:10001
EXPOSE 50051 50052 9090
CMD ["python", "-m", "llm_svc"]

FROM python AS llm-cuda
# Triton compiles a launcher for each kernel.
RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc libc6-dev python3-dev \
 && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=build-llm-cuda /opt/day0 /opt/day0
USER 10001:10001
EXPOSE 50051 50052 9090
CMD ["python", "-m", "llm_svc"]
