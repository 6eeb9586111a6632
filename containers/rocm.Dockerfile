# The image for engine=huggingface on AMD's GPUs: AMD's PyTorch, the same packages as huggingface.Dockerfile, and ROCm's amdsmi.
# Build it with containers/build.sh rocm. It was not built on AMD's base, and not run on a GPU.
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

# amdsmi must be that of the base's ROCm: it loads ROCm's library. Its folder is copied, because pip writes into it.
RUN set -eu; : "${COMMIT:?build it with containers/build.sh}"; . /opt/runstop/containers/pins.env; \
    cp -r "${ROCM_PATH:-/opt/rocm}/share/amd_smi" /tmp/amd_smi; \
    bash /opt/runstop/containers/install.sh "transformers==$TRANSFORMERS" "accelerate==$ACCELERATE" "peft==$PEFT" \
        "deepspeed==$DEEPSPEED" "bitsandbytes==$BITSANDBYTES" psutil /tmp/amd_smi "/opt/runstop[weights,data]"; \
    rm -rf /tmp/amd_smi; \
    HOME=/nowhere python3 -c "import transformers, accelerate, peft, bitsandbytes"; \
    python3 /opt/runstop/containers/marker.py "$ROCM_NAME" --base "$BASE" --commit "$COMMIT" \
        torch transformers accelerate peft deepspeed bitsandbytes amdsmi mlperf-logging runstop
