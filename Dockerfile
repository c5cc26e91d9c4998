# The image of every container of docker-compose.yml: brokers, ZooKeeper, clients, reports.
#
# BASE_IMAGE needs Python 3.11 or newer with venv, and bash. Where no image can be pulled,
# `make compose-base` builds isthmus-base from Debian packages.
ARG BASE_IMAGE=python:3.12-slim

FROM ${BASE_IMAGE} AS build
# Where pip looks for packages, if not where it does by itself.
ARG PIP_INDEX_URL
ARG PIP_TRUSTED_HOST
# What Isthmus needs first, in a layer of its own: a change of our sources does not download Spark again.
COPY pyproject.toml /src/
# Compose hands over empty arguments where none are set; pip would take them at their word.
RUN [ -n "$PIP_INDEX_URL" ] || unset PIP_INDEX_URL; \
    [ -n "$PIP_TRUSTED_HOST" ] || unset PIP_TRUSTED_HOST; \
    python3 -m venv /opt/isthmus \
    && python3 -c 'import tomllib; project = tomllib.load(open("/src/pyproject.toml", "rb")); needs = project["project"]; \
print("\n".join(needs["dependencies"] + needs["optional-dependencies"]["java"]), file=open("/needs", "w")); \
print("\n".join(project["build-system"]["requires"]), file=open("/build-needs", "w"))' \
    && /opt/isthmus/bin/pip install --no-cache-dir --disable-pip-version-check -r /needs \
    && python3 -m venv /opt/build \
    && /opt/build/bin/pip install --no-cache-dir --disable-pip-version-check wheel -r /build-needs
COPY . /src
RUN cd /src \
    && /opt/build/bin/pip wheel --no-deps --no-build-isolation --disable-pip-version-check --wheel-dir /wheels . \
    && /opt/isthmus/bin/pip install --no-deps --no-index --disable-pip-version-check /wheels/*.whl

FROM ${BASE_IMAGE}
COPY --from=build /opt/isthmus /opt/isthmus
ENV PATH=/opt/isthmus/bin:$PATH PYTHONUNBUFFERED=1 HOME=/home/isthmus
# By hand, because not every base image has useradd. Spark needs the name; volumes that are mounted here
# take over the owner of the folder.
RUN echo 'isthmus:x:10001:10001::/home/isthmus:/bin/bash' >> /etc/passwd \
    && echo 'isthmus:x:10001:' >> /etc/group \
    && install -d -o 10001 -g 10001 /home/isthmus /traces /report /data
USER isthmus
WORKDIR /home/isthmus
CMD ["isthmus", "--help"]
