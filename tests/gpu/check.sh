#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# On a machine with an NVIDIA device, as root, in the repository's folder: watches a real CUDA
# program and compares what was seen with what it did. Takes two to five minutes, most of it for
# packages. Elsewhere it says that there is no device and ends with 0.
#
# A machine that reaches no package index needs what it lacks from another one of its kind: there,
# `tests/gpu/check.sh --pack` puts it into the folder .gpu, which travels with the repository. Then it
# takes half a minute and needs nothing but Python 3.11 or 3.12.
set -euo pipefail
cd "$(dirname "$0")/../.."
pack=.gpu

if [ "${1:-}" = --pack ]; then
	make -s setup
	rm -rf "$pack"
	mkdir -p "$pack/wheels" "$pack/objects" "$pack/lib"
	for version in 3.11 3.12; do
		.venv/bin/python -m pip download -qq --disable-pip-version-check --only-binary :all: \
			--python-version "$version" -d "$pack/wheels" -r <(.venv/bin/python -m tests.gpu.packages "$version")
	done
	cp probes/*."$(uname -m)".bpf.o "$pack/objects"
	cp "$(.venv/bin/python -m tests.gpu.check --runtime)" "$pack/libcudart.so.12"
	cp "$(.venv/bin/python -m tests.gpu.check --program)" "$pack/gpu_program"
	for name in libbpf.so.1 libelf.so.1; do
		cp -L "$(ldconfig -p | awk -v name="$name" '$1 == name { print $NF; exit }')" "$pack/lib"
	done
	echo "packed: $(du -sh "$pack" | cut -f1) in $pack"
	exit 0
fi

if ! compgen -G "/dev/nvidia[0-9]*" >/dev/null && [ -z "${GPU_STAND_IN:-}" ]; then
	echo "skipped: no NVIDIA device on this machine"
	exit 0
fi

if [ ! -d "$pack" ]; then
	make -s setup
	exec .venv/bin/python -m tests.gpu.check
fi

for python in python3.12 python3.11 python3 none; do
	if command -v "$python" >/dev/null && "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))'; then
		break
	fi
done
if [ "$python" = none ]; then
	echo "no Python 3.11 or 3.12 on this machine" >&2
	exit 1
fi
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
mkdir -p "$place/tree/profinferd"
for room in agent probes exporters; do ln -s "$PWD/$room" "$place/tree/profinferd/$room"; done
cp "$pack"/objects/*.bpf.o probes
# A wheel is a zip file: neither pip nor venv is needed.
tag=$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
for wheel in "$pack"/wheels/*.whl; do
	case $wheel in *-"$tag"-* | *-none-* | *-abi3-*) "$python" -m zipfile -e "$wheel" "$place/site" ;; esac
done
if ! "$python" -c 'import ctypes; ctypes.CDLL("libbpf.so.1")' 2>/dev/null; then
	export LD_LIBRARY_PATH="$PWD/$pack/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
fi
export GPU_PROGRAM="$PWD/$pack/gpu_program" GPU_RUNTIME="${GPU_RUNTIME:-$PWD/$pack/libcudart.so.12}"
PYTHONPATH="$place/site:$place/tree" "$python" -m tests.gpu.check
