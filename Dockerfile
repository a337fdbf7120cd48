FROM python:3.11-slim AS build
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev
WORKDIR /src
COPY . .
RUN python -m venv /opt/agilerl \
    && /opt/agilerl/bin/pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0 \
    && /opt/agilerl/bin/pip install --no-cache-dir -c constraints.txt '.[tasks]'

FROM python:3.11-slim
COPY --from=build /opt/agilerl /opt/agilerl
ENV PATH=/opt/agilerl/bin:$PATH
WORKDIR /work
ENTRYPOINT ["agilerl"]
CMD ["train"]
