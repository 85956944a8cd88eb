#!/bin/sh
# What `make gpu` runs, without make and without a virtual environment: sh tests/gpu/run.sh [folder]
exec "${PYTHON:-python3}" "$(dirname "$0")/run.py" ${1:+--out "$1"}
