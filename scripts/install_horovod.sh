#!/usr/bin/env bash
# Builds Horovod 0.28.1, its last release, into the active environment, for torch on gloo (no MPI, no NCCL): about 6
# minutes on two cores.
#
#     bash scripts/install_horovod.sh
#     horovodrun -np 2 --gloo python train.py strategy=horovod trainer.accelerator=cpu trainer.devices=2
#
# The release asks its compiler for C++14, with which torch's present headers do not compile. So it is built by a
# wrapper that asks for C++20 instead; nothing else is changed.
set -euo pipefail

VERSION=0.28.1
PYTHON=$(command -v python || command -v python3 || true)
REAL_CXX=$(command -v "${CXX:-g++}" || true)

if [[ -z $PYTHON ]] || ! "$PYTHON" -c "import torch" 2>/dev/null; then
    echo "Horovod is built against an installed torch: activate Lathe's environment first." >&2
    exit 2
fi
missing=()
[[ -n $REAL_CXX ]] || missing+=("a C++ compiler (g++, or name one in CXX)")
command -v make >/dev/null || missing+=("make")
if ((${#missing[@]})); then
    echo "Horovod is compiled here and this machine lacks $(IFS=,; echo "${missing[*]}"): install it (Debian: apt-get install g++ make) and start again." >&2
    exit 2
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT # whatever happens, the wrapper is removed

# Without build isolation (below) the tools that the build needs have to be here. cmake as a package, so that any
# machine has one.
"$PYTHON" -m pip install --quiet cmake cloudpickle psutil pyyaml cffi packaging setuptools wheel
export PATH="$(dirname "$("$PYTHON" -c 'import sys; print(sys.executable)')"):$PATH" # where pip puts cmake
if ! command -v cmake >/dev/null; then
    echo "Horovod is configured by cmake, which is not found in PATH: install it (pip install cmake) and start again." >&2
    exit 2
fi

cat >"$work/c++20" <<WRAPPER
#!/usr/bin/env bash
exec "$REAL_CXX" "\${@/#-std=*14/-std=c++20}"
WRAPPER
chmod +x "$work/c++20"

# --no-build-isolation: the build has to see the torch that will load it, not a fresh one. --no-deps: pip must not
# change torch.
# CMAKE_POLICY_VERSION_MINIMUM: cmake from 4 on refuses the old projects that Horovod carries.
env CXX="$work/c++20" CMAKE_POLICY_VERSION_MINIMUM=3.5 \
    HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 \
    "$PYTHON" -m pip install --no-build-isolation --no-deps --no-binary horovod --no-cache-dir "horovod==$VERSION"

"$PYTHON" - <<'CHECK'
import horovod.torch as hvd

assert hvd.gloo_built(), "Horovod was built without gloo"
print("Horovod is installed; its torch part loads, with gloo.")
CHECK
