# The official image of a server (from conf/server/*.yaml) with this project and loadgen. Ranks start the server as a child
# process. Build it with containers/build.sh serve vllm
ARG BASE
FROM ${BASE}
ARG BASE
ARG COMMIT

# Pyxis may mount the user's home: a ~/.local there must not override the packages of this image.
ENV PYTHONNOUSERSITE=1
# The base image's entry point would start the server before our ranks do.
ENTRYPOINT []

COPY pyproject.toml README.md LICENSE /opt/runstop/
COPY bench /opt/runstop/bench
COPY conf /opt/runstop/conf
COPY jobs /opt/runstop/jobs
COPY containers /opt/runstop/containers

RUN set -eu; : "${COMMIT:?build it with containers/build.sh}"; . /opt/runstop/containers/pins.env; \
    bash /opt/runstop/containers/install.sh "/opt/runstop[serve]"; \
    python3 /opt/runstop/containers/marker.py "$SERVE_NAME" --base "$BASE" --commit "$COMMIT" \
        torch mlcommons-loadgen mlperf-logging runstop
