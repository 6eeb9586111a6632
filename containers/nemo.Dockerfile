# The image for NeMo 2 recipes: NVIDIA's PyTorch, NeMo, megatron-core, and this project. Build it with containers/build.sh nemo
# For x86_64: the opencc that NeMo requires has no aarch64 wheel.
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

# One call of pip: a second call would not know the constraints of the first one's packages.
RUN set -eu; : "${COMMIT:?build it with containers/build.sh}"; . /opt/runstop/containers/pins.env; \
    bash /opt/runstop/containers/install.sh "nemo-toolkit[llm,run]==$NEMO_TOOLKIT" "nemo-run==$NEMO_RUN" \
        "leptonai==$LEPTONAI" "pyarrow==$PYARROW" "megatron-core==$NEMO_MEGATRON_CORE" psutil nvidia-ml-py \
        "/opt/runstop[weights]"; \
    HOME=/nowhere python3 -c "import datasets, lightning, transformers"; \
    python3 /opt/runstop/containers/marker.py "$NEMO_NAME" --base "$BASE" --commit "$COMMIT" \
        torch transformer-engine megatron-core nemo-toolkit nemo-run mlperf-logging runstop
