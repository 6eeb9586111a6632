# The image of the ranks: NVIDIA's PyTorch, megatron-core, and this project with MLPerf's checker. Build it with containers/build.sh train
ARG BASE
FROM ${BASE}
ARG BASE
ARG COMMIT

# Pyxis may mount the user's home: a ~/.local there must not override the packages of this image.
ENV PYTHONNOUSERSITE=1

COPY pyproject.toml README.md LICENSE /opt/runstop/
COPY bench /opt/runstop/bench
COPY conf /opt/runstop/conf
COPY jobs /opt/runstop/jobs
COPY containers /opt/runstop/containers

RUN set -eu; : "${COMMIT:?build it with containers/build.sh}"; . /opt/runstop/containers/pins.env; \
    bash /opt/runstop/containers/install.sh "megatron-core==$MEGATRON_CORE" psutil nvidia-ml-py "/opt/runstop[weights]"; \
    python3 /opt/runstop/containers/marker.py "$TRAIN_NAME" --base "$BASE" --commit "$COMMIT" \
        torch transformer-engine megatron-core mlperf-logging runstop
