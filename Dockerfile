# docker build -t mfsdp-compile .
# docker run --rm --shm-size 8g mfsdp-compile make demo             (make test; --gpus all for GPUs)
#
# TORCH decides between CPU and CUDA: what pip installs by that name from the index that it is configured with, for instance
# torch==2.13.0+cpu from an index of torch's builds for CPUs (PIP_EXTRA_INDEX_URL). By default it is the usual build for Linux,
# which runs on CPUs and, with its own CUDA libraries, on GPUs. With BASE=IMAGE, an image with Python and a supported torch of
# your own, that torch is taken and TORCH does not matter.
ARG BASE=python:3.12-slim
FROM ${BASE}
ARG TORCH=torch==2.13.0
ARG PIP_EXTRA_INDEX_URL=
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ make \
 && (python3 -c "import ensurepip" || apt-get install -y --no-install-recommends python3-venv python3-dev) \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /mfsdp-compile
COPY . .
RUN make venv TORCH="${TORCH}"
ENV PATH=/mfsdp-compile/.venv/bin:${PATH}
CMD ["make", "demo"]
