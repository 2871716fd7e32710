# raysim from its wheel, for CPUs or for NVIDIA GPUs:
#   docker build -t raysim .
#   docker build -t raysim:cuda --build-arg TORCH=https://download.pytorch.org/whl/cu128 .
# A run keeps its data in shared memory and its results in the folder that is mounted:
#   docker run --rm --shm-size=8g -v "$PWD:/work" raysim run quickstart
#   docker run --rm --shm-size=8g --gpus all -v "$PWD:/work" raysim:cuda run quickstart
FROM python:3.12-slim AS wheel
COPY . /source
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /source

FROM python:3.12-slim
ARG TORCH=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir --index-url "$TORCH" torch torchvision
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels pip install --no-cache-dir /wheels/*.whl
WORKDIR /work
ENTRYPOINT ["raysim"]
CMD ["--help"]
