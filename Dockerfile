# The coordinator, the gateway, and the command line for clients: docker build -t localhost/rollbridge/coordinator:0.3.0.dev0 .
#
# Without a network in the build: fetch the wheels first, and say where they are (docs/containers.md). Where no image of
# Python can be pulled either, `make images` builds on Debian's packages and does the rest.
ARG PYTHON_IMAGE=python:3.11-slim@sha256:c8271b1f627d0068857dce5b53e14a9558603b527e46f1f901722f935b786a39

FROM ${PYTHON_IMAGE} AS build
ARG PIP_NO_INDEX
ARG PIP_FIND_LINKS
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
# By which what is left of this stage is found and removed.
LABEL io.rollbridge.stage=build
WORKDIR /source
COPY . .
RUN python3 -m venv /opt/rollbridge \
 && /opt/rollbridge/bin/pip install --quiet --no-deps --require-hashes -r requirements/coordinator.lock \
 && /opt/rollbridge/bin/pip install --quiet --no-build-isolation --no-deps . \
 # What only the installation needs.
 && /opt/rollbridge/bin/pip uninstall --quiet --yes editables hatchling trove-classifiers setuptools pip

FROM ${PYTHON_IMAGE}
LABEL org.opencontainers.image.title="rollbridge" org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/rollbridge /opt/rollbridge
RUN echo 'rollbridge:x:10001:10001::/var/lib/rollbridge:/usr/sbin/nologin' >> /etc/passwd \
 && echo 'rollbridge:x:10001:' >> /etc/group \
 && mkdir -p /var/lib/rollbridge && chown 10001:10001 /var/lib/rollbridge
# Whichever of them runs serves metrics at one port, and answers probes at one socket: the check below holds for either.
ENV PATH=/opt/rollbridge/bin:$PATH PYTHONUNBUFFERED=1 \
 ROLLBRIDGE_COORDINATOR_METRICS_ADDRESS=0.0.0.0:9464 ROLLBRIDGE_GATEWAY_METRICS_ADDRESS=0.0.0.0:9464 \
 ROLLBRIDGE_COORDINATOR_PROBE_SOCKET=/tmp/rollbridge.sock ROLLBRIDGE_GATEWAY_PROBE_SOCKET=/tmp/rollbridge.sock
# By number, so that whoever insists on a user other than root can tell.
USER 10001:10001
WORKDIR /var/lib/rollbridge
EXPOSE 9464
STOPSIGNAL SIGTERM
# Healthy is a coordinator that could lead a group now: registered in ZooKeeper, and answered by Kafka; and a gateway that
# serves and has its lease in ZooKeeper.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 CMD ["python", "-m", "rollbridge.observe.healthcheck"]
ENTRYPOINT ["rollbridge"]
CMD ["coordinator"]
