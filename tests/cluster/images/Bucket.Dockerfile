# The object store of the tests: moto's server. Not for use: it accepts any secret.
ARG BASE=docker.io/library/debian:12.11-slim
FROM ${BASE}
ARG PIP_FIND_LINKS
ARG PIP_NO_INDEX
RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates python3 python3-venv \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/archives
COPY constraints.txt /src/constraints.txt
RUN python3 -m venv /opt/bucket \
 && /opt/bucket/bin/python -m pip install --no-cache-dir -c /src/constraints.txt pip setuptools \
 && /opt/bucket/bin/python -m pip install --no-cache-dir -c /src/constraints.txt 'moto[s3]>=5.2' flask flask-cors
USER 10001:10001
EXPOSE 5000
CMD ["/opt/bucket/bin/moto_server", "--host", "0.0.0.0", "--port", "5000"]
