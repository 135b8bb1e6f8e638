# Images of day0: docker build --target router|vision|llm|llm-cuda -t day0-TARGET .  Without a registry: make images.
# BASE is any Debian bookworm, also one made by debootstrap; give it with a digest to pin every byte.
ARG BASE=docker.io/library/debian:12.11-slim

FROM ${BASE} AS python
RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates python3 python3-venv \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/archives \
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
# pip reads both; `make images` gives a folder of wheels and no index. buildah hands no ARG on to a later stage.
ARG PIP_FIND_LINKS
ARG PIP_NO_INDEX
COPY constraints.txt pyproject.toml tools/list_requirements.py /src/
RUN python3 -m venv /opt/day0 \
 && python -m pip install --no-cache-dir -c /src/constraints.txt pip setuptools

FROM build AS build-router
ARG PIP_FIND_LINKS
ARG PIP_NO_INDEX
RUN python /src/list_requirements.py /src/pyproject.toml router cluster > /src/requirements.txt \
 && python -m pip install --no-cache-dir -c /src/constraints.txt -r /src/requirements.txt

# One layer for vision and llm, whose bulk is the same torch.
# PyPI's torch for Linux brings CUDA along; this index has the CPU build of the same version.
FROM build AS build-engines
ARG PIP_FIND_LINKS
ARG PIP_NO_INDEX
RUN python /src/list_requirements.py /src/pyproject.toml vision llm cluster > /src/requirements.txt \
 && python -m pip install --no-cache-dir -c /src/constraints.txt \
      --extra-index-url https://download.pytorch.org/whl/cpu -r /src/requirements.txt

FROM build AS build-llm-cuda
ARG PIP_FIND_LINKS
ARG PIP_NO_INDEX
RUN python /src/list_requirements.py /src/pyproject.toml llm cuda cluster > /src/requirements.txt \
 && python -m pip install --no-cache-dir -c /src/constraints.txt -r /src/requirements.txt

FROM build AS code
COPY README.md LICENSE /src/
COPY protos /src/protos
COPY svc_common /src/svc_common
COPY router_svc /src/router_svc
COPY vision_svc /src/vision_svc
COPY llm_svc /src/llm_svc
COPY kernels /src/kernels
COPY day0 /src/day0
RUN python -m pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels /src \
 && python -m pip install --no-cache-dir --no-deps --prefix /code /wheels/day0-*.whl

# The services set their own handlers for SIGTERM, so each may be process 1.
FROM python AS router
COPY --from=build-router /opt/day0 /opt/day0
COPY --from=code /code /opt/day0
USER 10001:10001
EXPOSE 50051 50052 9090
CMD ["python", "-m", "router_svc"]

FROM python AS engines
COPY --from=build-engines /opt/day0 /opt/day0
COPY --from=code /code /opt/day0

FROM engines AS vision
USER 10001:10001
EXPOSE 50051 50052 9090
CMD ["python", "-m", "vision_svc"]

FROM engines AS llm
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
COPY --from=code /code /opt/day0
USER 10001:10001
EXPOSE 50051 50052 9090
CMD ["python", "-m", "llm_svc"]
