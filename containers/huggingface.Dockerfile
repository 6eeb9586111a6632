# The image for engine=huggingface: NVIDIA's PyTorch, transformers, Accelerate, PEFT, DeepSpeed, bitsandbytes, and this project.
# Build it with containers/build.sh huggingface
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
    bash /opt/runstop/containers/install.sh "transformers==$TRANSFORMERS" "accelerate==$ACCELERATE" "peft==$PEFT" \
        "deepspeed==$DEEPSPEED" "bitsandbytes==$BITSANDBYTES" psutil nvidia-ml-py "/opt/runstop[weights,data]"; \
    HOME=/nowhere python3 -c "import transformers, accelerate, peft, deepspeed, bitsandbytes"; \
    python3 /opt/runstop/containers/marker.py "$HUGGINGFACE_NAME" --base "$BASE" --commit "$COMMIT" \
        torch transformers accelerate peft deepspeed bitsandbytes mlperf-logging runstop
