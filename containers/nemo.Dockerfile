# What NeMo 2 recipes run in: PyTorch of NVIDIA, NeMo, megatron-core, and this project. Build it with containers/build.sh nemo
# For x86_64: the opencc that NeMo asks for has no aarch64 wheel.
ARG BASE
FROM ${BASE}
ARG BASE
ARG COMMIT

# Pyxis may mount the user's home: a ~/.local there must not shadow what is installed here.
ENV PYTHONNOUSERSITE=1

COPY pyproject.toml README.md LICENSE /opt/runstop/
COPY bench /opt/runstop/bench
COPY conf /opt/runstop/conf
COPY jobs /opt/runstop/jobs
COPY containers /opt/runstop/containers

# One call: a second one would not know what the first one's packages must not have.
RUN set -eu; : "${COMMIT:?build it with containers/build.sh}"; . /opt/runstop/containers/pins.env; \
    bash /opt/runstop/containers/install.sh "nemo-toolkit[llm,run]==$NEMO_TOOLKIT" "nemo-run==$NEMO_RUN" \
        "leptonai==$LEPTONAI" "pyarrow==$PYARROW" "megatron-core==$NEMO_MEGATRON_CORE" psutil nvidia-ml-py \
        "/opt/runstop[weights]"; \
    HOME=/nowhere python3 -c "import datasets, lightning, transformers"; \
    python3 /opt/runstop/containers/marker.py "$NEMO_NAME" --base "$BASE" --commit "$COMMIT" \
        torch transformer-engine megatron-core nemo-toolkit nemo-run mlperf-logging runstop
