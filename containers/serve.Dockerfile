# A server's own image (conf/server/*.yaml names it) with this project and loadgen beside the server, which ranks start as
# their child. Build it with containers/build.sh serve vllm
ARG BASE
FROM ${BASE}
ARG BASE
ARG COMMIT

# Pyxis may mount the user's home: a ~/.local there must not shadow what is installed here.
ENV PYTHONNOUSERSITE=1
# The base's would start the server before our ranks do.
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
