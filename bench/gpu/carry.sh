#!/bin/sh
# What a bare GPU machine without a network lacks of minivllm, as wheels: run here, with a network, and copy the folder.
#
#   bench/gpu/carry.sh FOLDER [NAME==VERSION ...]     more names: what else should be compared, such as flashinfer-python
#
# There, Linux on x86-64 with Python 3.12, torch, triton and transformers of its own:
#
#   python3 -m pip install -q --no-index --no-deps --target /tmp/site FOLDER/*.whl
#   PYTHONPATH=/tmp/site python3 bench/gpu/run.py --part correctness --out
#
# PYTHON=3.11 in the environment collects for another Python.
set -eu
folder=${1:?"usage: bench/gpu/carry.sh FOLDER [NAME==VERSION ...]"}
shift
platforms=""
for glibc in 17 24 26 27 28 31 34 35; do
    platforms="$platforms --platform manylinux_2_${glibc}_x86_64"
done
# No dependencies: they are in the list, or on the machine (torch brings numpy, transformers brings safetensors ...).
for name in msgspec pyzmq cbor2 xxhash psutil gguf starlette uvicorn httpx httpcore h11 prometheus_client "$@"; do
    # One version of each, however often this is run: two would stop the whole install.
    rm -f "$folder/$(printf %s "${name%%=*}" | tr - _)"-*.whl
    # shellcheck disable=SC2086
    python3 -m pip download -q --no-deps --only-binary=:all: --implementation cp --python-version "${PYTHON:-3.12}" \
        $platforms --platform manylinux2014_x86_64 --platform manylinux1_x86_64 -d "$folder" "$name"
done
du -sh "$folder"
