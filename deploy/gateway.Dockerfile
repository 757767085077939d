# The gateway: no torch, no model file. Build from the repository's root.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm
FROM ${PYTHON_IMAGE}

WORKDIR /app
COPY constraints.txt pyproject.toml README.md CHANGELOG.md LICENSE ./
COPY protos protos
COPY service service
COPY worker worker
COPY bench bench
RUN pip install --no-cache-dir -c constraints.txt . && useradd --system --no-create-home pagecast

USER pagecast
EXPOSE 7070
STOPSIGNAL SIGTERM
ENTRYPOINT ["pagecast", "serve"]
CMD ["--listen", "0.0.0.0:7070", "--worker-address", "worker:7071"]
